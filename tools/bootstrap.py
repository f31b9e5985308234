"""Creates an environment once per pinned requirements and Python: `python3 tools/bootstrap.py dev` prints its folder.

Standard library only. Progress goes to stderr, the path to stdout.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also runs as a script

from tools.cache import cache_root, finished, key_of  # noqa: E402
from tools.debian import install_packages  # noqa: E402
from tools.errors import Failed, Missing  # noqa: E402
from tools.shell import logged, output, progress, say  # noqa: E402

EXTRAS = ("dev", "operator", "router", "runtime", "api", "clients")
BUILT = ("clients",)
"""Extras with requirements that are published as source only."""
MIN_PYTHON = (3, 11)
EXIT_MISSING = 3
MODEL_PINS = "requirements/model.txt"


def python_key() -> str:
    """Returns the key of the running Python."""
    return key_of(sys.version, os.path.realpath(sys.executable))


def uv() -> Path:
    """Returns the pinned version of uv, installed in its own environment."""
    pins = ROOT / "tools/uv.txt"

    def make(folder: Path) -> None:
        with progress("fetching uv, the installer of Python packages"):
            try:
                output(sys.executable, "-m", "venv", folder)
            except Failed:  # Debian ships the module without ensurepip
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                install_packages(f"python{version}-venv")
                output(sys.executable, "-m", "venv", "--clear", folder)
            quiet = ("-q", "--disable-pip-version-check", "--require-hashes")
            output(folder / "bin/python", "-m", "pip", "install", *quiet, "-r", pins)

    return finished(cache_root() / f"uv-{key_of(pins.read_bytes(), python_key())}", make) / "bin/uv"


def environment(extra: str) -> Path:
    """Returns the environment with the pinned requirements of `extra`, created if the cache lacks it."""
    pins = (ROOT / f"requirements/{extra}.txt").read_text()
    if extra == "dev":
        pins += (ROOT / MODEL_PINS).read_text()

    def make(folder: Path) -> None:
        program = uv()
        folder.rmdir()  # uv creates it; relocatable, because it is renamed into place
        output(program, "venv", "-q", "--relocatable", "--python", sys.executable, folder)
        wanted = folder / "requirements.txt"
        wanted.write_text(pins)
        # the list is complete, so uv resolves no dependencies; wheels need no compiler
        wheels = () if extra in BUILT else ("--only-binary", ":all:")
        how = ("--no-deps", "--require-hashes", *wheels, "-r", wanted)
        command = (program, "pip", "install", "--python", folder / "bin/python", *how)
        logged(
            f"installing requirements/{extra}.txt (minutes the first time)",
            *command,
            log=cache_root() / "logs" / f"venv-{extra}.log",
        )
        (folder / "bin/uv").symlink_to(program)

    return finished(cache_root() / f"venv-{extra}-{key_of(pins, python_key())}", make)


def main(words: list[str]) -> int:
    """Prints the folder of the environment; returns the exit status."""
    if len(words) != 1 or words[0] not in EXTRAS:
        say(f"usage: python3 tools/bootstrap.py {'|'.join(EXTRAS)}")
        return 2
    if sys.version_info < MIN_PYTHON:
        raise Missing(f"Python 3.11 or newer (python3 is {sys.version.split()[0]})")
    print(environment(words[0]))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Missing as missing:
        say(f"missing: {missing}")
        sys.exit(EXIT_MISSING)
    except Failed as failed:
        say(f"failed: {failed}")
        sys.exit(1)
