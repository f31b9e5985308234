"""Triton's cache over the folder of an image: reads there first, writes what is missing to Triton's own folder.

Entries of the folder may have been made at another path: files of a group are found by name. Triton compiles C modules (its
access to the driver; before 3.7 also a launcher for each kernel) with gcc unless the folder has them, so an image needs neither
gcc nor Python's headers.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.runtime import cache as triton_cache

LDCONFIG = Path("/sbin/ldconfig")
LIBRARY_FOLDER = f"/usr/lib/{os.uname().machine}-linux-gnu"
"""Where the container toolkit mounts libcuda.so.1 in Debian's layout. Only a compilation of C modules reads it."""


def open_folder(folder: Path) -> None:
    """Makes this process read compiled kernels and modules from the folder; before Triton's first use."""

    class FolderCache(ReadThroughCache):
        source = folder

    triton.knobs.cache.manager_class = FolderCache
    triton.knobs.build.impl = ModuleSource(folder)
    if triton.knobs.nvidia.libcuda_path is None and not LDCONFIG.exists():  # Triton runs ldconfig to find the driver
        triton.knobs.nvidia.libcuda_path = LIBRARY_FOLDER


_FILE_CACHE: Any = triton_cache.FileCacheManager


class ReadThroughCache(triton_cache.CacheManager):  # type: ignore[misc]
    """One entry of Triton's cache: the one of `source` if it has the key, which nothing changes; else a file cache's."""

    source: Path

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._entry = self.source / "triton" / key
        self._is_built = not (override or dump) and self._entry.is_dir()
        self._make: Callable[[], Any] = partial(_FILE_CACHE, key, override=override, dump=dump)

    def get_file(self, filename: str) -> str | None:
        """Returns the path of a file, if the entry has it."""
        path = self._entry / filename
        if self._is_built:
            return str(path) if path.exists() else None
        found: str | None = self._make().get_file(filename)
        return found

    def get_group(self, filename: str) -> Mapping[str, str] | None:
        """Returns the paths of the files of a group by name, if the entry has the group."""
        if not self._is_built:
            found: Mapping[str, str] | None = self._make().get_group(filename)
            return found
        try:
            names = json.loads((self._entry / f"__grp__{filename}").read_text())["child_paths"]
        except (OSError, ValueError, KeyError):
            return None
        return {name: str(self._entry / name) for name in names if (self._entry / name).exists()}

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Writes a file to Triton's folder and returns its path."""
        return str(self._make().put(data, filename, binary=binary))

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        """Writes a group to Triton's folder."""
        return str(self._make().put_group(filename, group))


class ModuleSource:
    """Triton's seam for C modules: one of the folder, else one compiled now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(
        self, name: str, src: str, srcdir: str, library_dirs: Sequence[str], include_dirs: Sequence[str], libraries: Sequence[str]
    ) -> str:
        """Returns the path of the module compiled from the file `src`."""
        built = module_path(self._folder, name, Path(src).read_bytes())
        if built.exists():
            return str(built)
        target = Path(srcdir) / built.name
        flags = [*(f"-l:{library}" for library in libraries), *(f"-L{path}" for path in library_dirs)]
        compile_module(Path(src), target, [*include_dirs, sysconfig.get_paths()["include"]], flags)
        return str(target)


def module_path(folder: Path, name: str, source: bytes) -> Path:
    """Returns the path of a C module in the folder."""
    return folder / "modules" / hashlib.sha256(source).hexdigest() / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_module(source: Path, target: Path, include_dirs: Sequence[Any], flags: Sequence[str]) -> None:
    """Compiles a C module with gcc, clang or the program in CC. Raises CalledProcessError, FileNotFoundError."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    command = [compiler, str(source), "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(target)]
    subprocess.run([*command, *(f"-I{path}" for path in include_dirs), *flags], check=True, stdout=subprocess.DEVNULL)
