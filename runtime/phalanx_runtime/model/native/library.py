"""The compiled kernels: built once per source and processor into the cache, loaded into the process that has torch.

They use the OpenMP runtime that torch brought, so its threads are theirs: `torch.set_num_threads` counts for both, and idle
threads sleep as torch's do. Without a compiler there is no library, and the twins in plain torch are used.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from phalanx_runtime.model.processor import read_processor

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 300.0


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels, compiled for one kind of processor. `lanes` floats make a vector there. has_runs: it multiplies pairs of bf16,
    so that attention over runs is there."""

    functions: ctypes.CDLL
    lanes: int
    has_runs: bool


@functools.cache
def library(target: str = "native") -> Library | None:
    """The kernels for this processor, or for another that g++ names so; None, with a line in the log, where none can be built."""
    try:
        return _open(_built(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled kernels: %s; torch computes instead", _reason(error))
        return None


def cache_folder() -> Path:
    """Where compiled kernels are kept: $PHALANX_CACHE, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx; there `kernels`."""
    chosen = os.environ.get("PHALANX_CACHE")
    home = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    return home.absolute() / "kernels"


def _built(target: str) -> Path:
    """The shared library; compiled by one process while others wait, in some seconds."""
    path = cache_folder() / f"{_key(target)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")
            command = ["g++", *FLAGS, f"-march={target}", *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(part)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
            part.replace(path)
    return path


def _key(target: str) -> str:
    """Sixteen hex digits of all that the compiled code depends on."""
    digest = hashlib.sha256(repr((FLAGS, target, platform.machine(), sorted(read_processor().flags))).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _open(path: Path) -> Library:
    functions = ctypes.CDLL(str(path))
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    functions.phalanx_lanes.restype = count
    functions.phalanx_decode.argtypes = [count, *[pointer] * 7, number, number]
    functions.phalanx_decode.restype = None
    functions.phalanx_attends.restype = count
    functions.phalanx_attend.argtypes = [*[pointer] * 4, count, *[pointer] * 2, number, number]
    functions.phalanx_attend.restype = None
    functions.phalanx_linear.argtypes = [count, count, *[pointer] * 6]
    functions.phalanx_linear.restype = None
    functions.phalanx_norm.argtypes = [count, count, *[pointer] * 4, number]
    functions.phalanx_norm.restype = None
    functions.phalanx_rotate.argtypes = [count, *[pointer] * 4]
    functions.phalanx_rotate.restype = None
    functions.phalanx_write.argtypes = [pointer] * 6
    functions.phalanx_write.restype = None
    return Library(functions, int(functions.phalanx_lanes()), bool(functions.phalanx_attends()))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"g++ failed: {str(error.stderr)[-300:]}"
    return "there is no g++" if isinstance(error, FileNotFoundError) else str(error)
