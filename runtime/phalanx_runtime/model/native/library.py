"""Loads the C++ kernels: those of the image, else compiled once per source and processor.

They use torch's OpenMP runtime, so they share its threads: `torch.set_num_threads` applies to both. Without a compiler there is
no library, and the torch reference implementations run.
"""

import ctypes
import fcntl
import functools
import logging
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from phalanx_runtime.model.native.build import SHIPPED, compile_to, reason, shipped, source_key
from phalanx_runtime.model.processor import read_processor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """Kernels compiled for one kind of processor."""

    # File name without suffix.
    name: str
    functions: ctypes.CDLL
    # Floats per vector register.
    lanes: int
    # The processor multiplies pairs of bf16, which attention over runs needs.
    has_runs: bool


@functools.cache
def library(target: str = "native", folder: Path = SHIPPED) -> Library | None:
    """Returns the kernels for this processor, or for g++'s `target`; None, with a log line, where they cannot compile.

    `folder` holds kernels of an image, which need no compiler.
    """
    try:
        found = shipped(folder, platform.machine(), read_processor().flags) if target == "native" else None
        made = _open(found or _built(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled kernels: %s; torch computes instead", reason(error))
        return None
    log.info("compiled kernels: %s%s", made.name, "" if found is None else ", of the image")
    return made


def cache_folder() -> Path:
    """Returns the cache of compiled kernels: `kernels` in $PHALANX_CACHE, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx."""
    chosen = os.environ.get("PHALANX_CACHE")
    home = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    return home.absolute() / "kernels"


def _built(target: str) -> Path:
    """Returns the shared library; one process compiles it in a few seconds while others wait."""
    path = cache_folder() / f"{source_key(target, platform.machine(), *sorted(read_processor().flags))}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path, (f"-march={target}",))
    return path


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
    return Library(path.stem, functions, int(functions.phalanx_lanes()), bool(functions.phalanx_attends()))
