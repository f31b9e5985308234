"""Compiles the C++ kernels with g++. Does not import torch, so image builds can run it.

    python3 -m phalanx_runtime.model.native.build FOLDER

writes the kernels of every level of this machine's architecture into FOLDER. A level is an instruction set; at run time the
highest level that the processor supports is loaded.
"""

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
SHIPPED = SOURCES / "built"
"""The folder of kernels in an image."""
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 300.0
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """Processors with all of `flags`, by their Linux names, and the g++ options for them."""

    name: str
    machine: str
    options: tuple[str, ...]
    flags: frozenset[str]


LEVELS = (
    Level("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
)
"""Best level of each architecture first. Other processors use torch alone."""


def source_key(*more: str) -> str:
    """Returns sixteen hex digits over sources, options and `more`."""
    digest = hashlib.sha256(repr((FLAGS, *more)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_to(path: Path, options: tuple[str, ...]) -> None:
    """Compiles the shared library to `path` atomically. Raises OSError, SubprocessError."""
    part = path.with_suffix(f".{os.getpid()}.part")
    command = ["g++", *FLAGS, *options, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(part)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    part.replace(path)


def shipped_path(folder: Path, level: Level) -> Path:
    """Returns the path of a level's kernels; the name depends on the sources."""
    return folder / f"{level.name}-{source_key(*level.options)}.so"


def shipped(folder: Path, machine: str, flags: frozenset[str]) -> Path | None:
    """Returns the best kernels in the folder for the architecture and flags; None without any."""
    fitting = (shipped_path(folder, level) for level in LEVELS if level.machine == machine and level.flags <= flags)
    return next((path for path in fitting if path.exists()), None)


def ship(folder: Path, machine: str) -> list[str]:
    """Compiles all levels of the architecture into the folder; returns their names. Raises OSError, SubprocessError."""
    folder.mkdir(parents=True, exist_ok=True)
    levels = [level for level in LEVELS if level.machine == machine]
    for level in levels:
        compile_to(shipped_path(folder, level), level.options)
    return [level.name for level in levels]


def reason(error: Exception) -> str:
    """Returns why nothing was compiled."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"g++ failed: {str(error.stderr)[-300:]}"
    return "there is no g++" if isinstance(error, FileNotFoundError) else str(error)


if __name__ == "__main__":
    try:
        print(*ship(Path(sys.argv[1]), platform.machine()))
    except (OSError, subprocess.SubprocessError) as failure:
        sys.exit(reason(failure))
