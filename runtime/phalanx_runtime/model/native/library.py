"""Loads the C++ kernels: prebuilt in the image, else compiled once per source and processor.

They share torch's OpenMP threads. Without a compiler, the torch references run.
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

from phalanx_runtime.model.native.build import PREBUILT, compile_to, failure_reason, find_prebuilt, source_key
from phalanx_runtime.model.processor import is_limited, read_processor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """Kernels compiled for one kind of processor."""

    name: str
    """File name without suffix."""
    functions: ctypes.CDLL
    lanes: int
    """Floats per vector register."""
    has_bf16_dot: bool
    """Required by the step kernel of attention."""
    has_int8_dot: bool
    """Required by linears that round their inputs."""


@functools.cache
def library(target: str = "native", folder: Path = PREBUILT) -> Library | None:
    """Loads the kernels for g++'s `target`, prebuilt in `folder` or compiled. Logs a failure.

    `native` is this processor, without the vectors that the environment forbids (`processor.LIMIT`).
    """
    try:
        prebuilt = find_prebuilt(folder, platform.machine(), read_processor().flags) if target == "native" else None
        compiled = _open(prebuilt or _build("x86-64-v3" if target == "native" and is_limited() else target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled kernels; torch computes instead", extra={"why": failure_reason(error)})
        return None
    log.info("compiled kernels loaded", extra={"kernels": compiled.name, "is_prebuilt": prebuilt is not None})
    return compiled


def cache_folder() -> Path:
    """Returns `kernels` in $PHALANX_CACHE, $XDG_CACHE_HOME/phalanx or ~/.cache/phalanx."""
    configured = os.environ.get("PHALANX_CACHE")
    home = Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
    return home.absolute() / "kernels"


def _build(target: str) -> Path:
    """Returns the shared library; one process compiles it while others wait."""
    processor = sorted(read_processor().flags) if target == "native" else ()
    path = cache_folder() / f"{source_key(target, platform.machine(), *processor)}.so"
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
    functions.phalanx_decode.argtypes = [count, *[pointer] * 6, number, number, pointer, pointer]
    functions.phalanx_decode.restype = None
    functions.phalanx_attends.restype = count
    functions.phalanx_attend.argtypes = [*[pointer] * 3, count, *[pointer] * 2, number, number]
    functions.phalanx_attend.restype = None
    functions.phalanx_attend_codes.argtypes = [count, *[pointer] * 3, count, *[pointer] * 2, number, number, pointer, pointer]
    functions.phalanx_attend_codes.restype = None
    functions.phalanx_linear.argtypes = [count, count, *[pointer] * 6]
    functions.phalanx_linear.restype = None
    functions.phalanx_grouped.argtypes = [count, *[pointer] * 10]
    functions.phalanx_grouped.restype = None
    functions.phalanx_rounded_groups.argtypes = [count, *[pointer] * 8]
    functions.phalanx_rounded_groups.restype = None
    functions.phalanx_rounds.restype = count
    functions.phalanx_rounded.argtypes = [count, *[pointer] * 7]
    functions.phalanx_rounded.restype = None
    functions.phalanx_ggml.argtypes = [count, *[pointer] * 5]
    functions.phalanx_ggml_rows.argtypes = [count, count, pointer, pointer, count, count, pointer]
    functions.phalanx_ggml.restype = functions.phalanx_ggml_rows.restype = None
    functions.phalanx_adapters.argtypes = [count, *[pointer] * 6]
    functions.phalanx_adapters.restype = None
    functions.phalanx_norm.argtypes = [count, count, *[pointer] * 4, number]
    functions.phalanx_norm.restype = None
    functions.phalanx_norm_heads.argtypes = [count, count, *[pointer] * 3, number]
    functions.phalanx_norm_heads.restype = None
    functions.phalanx_gate.argtypes = [count, *[pointer] * 3]
    functions.phalanx_gate.restype = None
    functions.phalanx_rotate.argtypes = [count, *[pointer] * 4]
    functions.phalanx_rotate.restype = None
    functions.phalanx_write.argtypes = [pointer] * 6
    functions.phalanx_write.restype = None
    functions.phalanx_encode.argtypes = [count, *[pointer] * 5]
    functions.phalanx_encode.restype = None
    functions.phalanx_encode_with_feedback.argtypes = [count, count, pointer]
    functions.phalanx_encode_with_feedback.restype = None
    functions.phalanx_hadamard.argtypes = [count, *[pointer] * 3]
    functions.phalanx_hadamard.restype = None
    functions.phalanx_layers.argtypes = [*[pointer] * 4, count, number]
    functions.phalanx_layers.restype = None
    return Library(
        name=path.stem,
        functions=functions,
        lanes=int(functions.phalanx_lanes()),
        has_bf16_dot=bool(functions.phalanx_attends()),
        has_int8_dot=bool(functions.phalanx_rounds()),
    )
