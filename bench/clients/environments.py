"""Environments of the clients in the cache, named by their pinned requirements: Python's of each, and node's."""

import re
import shutil
import sys
from pathlib import Path

from tools.bootstrap import environment as shared_environment
from tools.bootstrap import python_key, uv
from tools.cache import cache_root, finished, key_of
from tools.errors import Missing
from tools.shell import logged, output

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NODE = HERE / "node"
MIN_NODE = 20
SHARED = ("dev", "api", "clients")
"""Environments of the repository's own requirements."""


def requirements(name: str) -> Path:
    return ROOT / "requirements" / f"{name}.txt" if name in SHARED else HERE / "requirements" / f"{name}.txt"


def version_of(name: str, package: str) -> str:
    """Returns the pinned version of a package in an environment. Raises ValueError without one."""
    found = re.search(rf"^{re.escape(package)}(?:\[.*\])?==(\S+)", requirements(name).read_text(), re.M)
    if found is None:
        raise ValueError(f"{requirements(name)} has no pin of {package}")
    return found[1]


def python_of(name: str) -> Path:
    """Returns the Python of an environment; installs it if absent."""
    if name in SHARED:
        return shared_environment(name) / "bin/python"
    pins = requirements(name).read_text()

    def make(folder: Path) -> None:
        program = uv()
        folder.rmdir()  # uv creates it; relocatable, because it is renamed into place
        output(program, "venv", "-q", "--relocatable", "--python", sys.executable, folder)
        (folder / "requirements.txt").write_text(pins)
        how = ("--require-hashes", "--only-binary", ":all:", "-r", folder / "requirements.txt")
        log = cache_root() / "logs" / f"client-{name}.log"
        logged(f"installing {name}", program, "pip", "install", "--python", folder / "bin/python", *how, log=log)

    return finished(cache_root() / f"client-{name}-{key_of(pins, python_key())}", make) / "bin/python"


def node_modules() -> Path:
    """Returns a folder with the pinned packages of node and our program; installs it if absent. Raises Missing."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Missing("node and npm")
    major = int(output(node, "--version").strip().lstrip("v").partition(".")[0])
    if major < MIN_NODE:
        raise Missing(f"node {MIN_NODE} or newer (this is {major})")
    files = sorted(path for path in NODE.iterdir() if path.is_file())

    def make(folder: Path) -> None:
        for path in files:
            shutil.copy(path, folder)
        log = cache_root() / "logs" / "client-node.log"
        logged("installing packages of node", npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", log=log, cwd=folder)

    return finished(cache_root() / f"client-node-{key_of(*(path.read_bytes() for path in files))}", make)
