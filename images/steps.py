"""Fills the layers of an image: the base (Debian's Python), the pinned requirements, our packages.

Each step fills a folder that is copied to `/`. The Dockerfiles and the archives of the test cluster use the same steps. The
image's own Python compiles the byte code, with unchecked hashes: pods start without compiling, and builds are reproducible.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from images.layout import CERTIFICATES, DEBIAN_PACKAGES, USER, WRITABLE, Program
from tools import debian
from tools.bootstrap import uv
from tools.errors import Failed
from tools.shell import logged, output, progress, say

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("bin", "lib", "lib64", "sbin")  # folders that are links into /usr in Debian
EMPTY = ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "var")
UNUSED = (
    *("usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/bug", "usr/share/pixmaps"),
    *("usr/share/applications", "usr/share/info", "usr/share/python3", "usr/share/readline"),
)
DOCUMENTATION = "usr/share/doc"
UNUSED_MODULES = ("idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo")


def fill_base(root: Path) -> list[str]:
    """Fills the base layer: Python, the C++ library, certificates, a user, no shell. Returns its Debian packages."""
    packages = debian.unpack(DEBIAN_PACKAGES, root, lambda name: name not in debian.INSTALLERS)
    for name in LINKS:  # packages of an older Debian have these as folders
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in EMPTY:
        (root / name).mkdir(exist_ok=True)
    for unused in UNUSED:
        shutil.rmtree(root / unused, ignore_errors=True)
    keep_copyrights(root)
    library = root / "usr/lib" / python_version(root)
    for module in UNUSED_MODULES:
        shutil.rmtree(library / module, ignore_errors=True)
    for path in WRITABLE:
        folder = root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(folder, USER, USER)
    (root / "tmp").chmod(0o1777)
    _write(root, "etc/passwd", f"root:x:0:0:root:/root:/nonexistent\nnonroot:x:{USER}:{USER}:nonroot:/tmp:/nonexistent\n")
    _write(root, "etc/group", f"root:x:0:\nnonroot:x:{USER}:\n")
    _write(root, "etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")  # else glibc queries no name server
    trusted = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    _write(root, CERTIFICATES.lstrip("/"), "".join(path.read_text() for path in trusted))
    _compile(root, library, root)
    return packages


def keep_copyrights(root: Path) -> None:
    """Removes what the packages' folders of documentation have, except copyright files and links to such folders."""
    folder = root / DOCUMENTATION
    for package in sorted(folder.iterdir()) if folder.is_dir() else []:
        for path in sorted(package.iterdir()) if package.is_dir() and not package.is_symlink() else []:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "copyright":
                path.unlink()


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def python_version(base: Path) -> str:
    """Returns the name of the base layer's Python, such as python3.11."""
    target = os.readlink(base / "usr/bin/python3")
    if not re.fullmatch(r"python3\.\d+", target):
        raise Failed(f"{base}/usr/bin/python3 is a link to {target}: expected python3.N in the same folder")
    return target


def python(base: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns command and environment that run the base layer's Python from outside: no chroot, bytecode beside modules."""
    (loader,) = (base / "usr/lib").glob("*-linux-gnu/ld-linux-*.so.*")
    command = (str(loader), "--library-path", str(loader.parent), str(base / "usr/bin" / python_version(base)))
    return command, {"PYTHONHOME": str(base / "usr"), "PYTHONHASHSEED": "0", "PYTHONPATH": "", "PYTHONPYCACHEPREFIX": ""}


def _compile(base: Path, folder: Path, root: Path) -> None:
    command, env = python(base)
    how = ("--invalidation-mode", "unchecked-hash", "-q", "-q", "-f", "-j", str(os.cpu_count() or 1), "-s", str(root), "-p", "/")
    # Some packages contain files for other versions of Python; a file that does not compile here is not imported here.
    output(*command, "-c", "import compileall, sys; compileall.main(); sys.exit(0)", *how, folder, env=env)


def packages_folder(base: Path, root: Path) -> Path:
    """Returns the folder where Debian's Python finds packages of the administrator."""
    return root / "usr/local/lib" / python_version(base) / "dist-packages"


def install(base: Path, requirements: Path, target: Path, link_mode: str) -> None:
    """Installs the pinned requirements, wheels only, for the base layer's Python into `target`."""
    version = python_version(base).removeprefix("python")
    how = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--link-mode", link_mode, "-r", requirements)
    where = ("--python", sys.executable, "--python-version", version, "--target", target)
    log = target.parent / f"{target.name}.log"
    logged(f"installing {requirements.name} for the images", uv(), "pip", "install", *where, *how, log=log)
    log.unlink()


def fill_requirements(base: Path, requirements: str, root: Path) -> None:
    """Fills `root` with the compiled pinned requirements."""
    target = packages_folder(base, root)
    target.mkdir(parents=True)
    install(base, ROOT / requirements, target, "copy")
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    _compile(base, target, root)


def fill_kernels(base: Path, program: Program, root: Path) -> None:
    """Fills `root` with the program's C++ kernels, compiled for every level of this architecture; empty without g++.

    Kernels have their own layer, because they rarely change and take a minute.
    """
    target = packages_folder(base, root) / Path(program.native).relative_to("runtime") / "built"
    if shutil.which("g++") is None:
        target.mkdir(parents=True)
        say(f"no g++: the image of the {program.name} has no compiled kernels and computes with torch only")
        return
    module, env = "phalanx_runtime.model.native.build", {"PYTHONPATH": "runtime", "PYTHONDONTWRITEBYTECODE": "1"}
    with progress(f"compiling the kernels of the {program.name} (a minute the first time)"):
        levels = output(sys.executable, "-m", module, target, cwd=ROOT, env=env)
    say(f"the image of the {program.name} has kernels for: {levels.strip() or 'no processor (unknown architecture)'}")


def fill_gpu_kernels(base: Path, requirements: Path, program: Program, root: Path) -> None:
    """Fills `root` with the program's Triton kernels; empty without gcc or the headers of the image's Python.

    The image's own Python compiles them with the requirements of its layer: the keys of Triton's cache depend on both.
    """
    target = packages_folder(base, root) / Path(program.gpu_kernels).relative_to("runtime") / "built"
    include = Path("/usr/include") / python_version(base)
    if shutil.which("gcc") is None or not (include / "Python.h").exists():
        target.parent.mkdir(parents=True)
        say(f"no gcc or no {include}/Python.h: pods of the {program.name} on GPUs compute with torch only")
        return
    command, env = python(base)
    paths = (packages_folder(base, requirements), *(ROOT / package.partition("/")[0] for package in program.packages))
    module = ("-W", "ignore", "-m", "phalanx_runtime.rank.kernels.ahead", target, include)
    log = root.parent / f"{root.name}.log"
    env |= {"PYTHONPATH": ":".join(map(str, dict.fromkeys(paths))), "PYTHONDONTWRITEBYTECODE": "1"}
    logged(f"compiling the GPU kernels of the {program.name}", *command, *module, log=log, env=env)
    say(log.read_text().splitlines()[-1])
    log.unlink()


def fill_packages(base: Path, program: Program, root: Path, change: Callable[[Path], None] | None = None) -> None:
    """Fills `root` with our compiled packages, the console command, and metadata for `importlib.metadata`.

    `change` may modify the packages in the folder that it receives, before they are compiled.
    """
    target = packages_folder(base, root)
    for package in program.packages:
        source = ROOT / package
        shutil.copytree(source, target / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if change is not None:
        change(target)
    _compile(base, target, root)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = f"usr/local/lib/{python_version(base)}/dist-packages/{project['name']}-{project['version']}.dist-info"
    _write(root, f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entry = f"{program.module}.__main__:main"
    _write(root, f"{about}/entry_points.txt", f"[console_scripts]\n{program.command} = {entry}\n")
    script = f"#!/usr/bin/python3\nimport sys\n\nfrom {program.module}.__main__ import main\n\nsys.exit(main())\n"
    _write(root, program.path.lstrip("/"), script)
    (root / program.path.lstrip("/")).chmod(0o755)
