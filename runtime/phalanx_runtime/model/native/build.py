"""The kernels of one kind of processor, compiled by g++. No torch here: images are built with it.

    python3 -m phalanx_runtime.model.native.build FOLDER

fills FOLDER, which lies beside this file in an image, with the kernels of every level of this machine's architecture. A level is
a set of instructions; who starts later on some processor of that architecture takes the highest that it knows.
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
"""Where an image has its kernels."""
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 300.0
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """Processors that have all of `flags`, as Linux names them, and how g++ is told to compile for them."""

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
"""The best of each architecture first. On processors below the last, and of other architectures, torch computes alone."""


def source_key(*more: str) -> str:
    """Sixteen hex digits of what is compiled and how, and of more that it depends on."""
    digest = hashlib.sha256(repr((FLAGS, *more)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_to(path: Path, options: tuple[str, ...]) -> None:
    """Nothing; the shared library lies at the path, whole. Raises OSError, SubprocessError."""
    part = path.with_suffix(f".{os.getpid()}.part")
    command = ["g++", *FLAGS, *options, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(part)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    part.replace(path)


def shipped_path(folder: Path, level: Level) -> Path:
    """Where the level's kernels lie in a folder; those of other sources have other names."""
    return folder / f"{level.name}-{source_key(*level.options)}.so"


def shipped(folder: Path, machine: str, flags: frozenset[str]) -> Path | None:
    """The best kernels in the folder for a processor of this architecture with these flags; None where it has none."""
    fitting = (shipped_path(folder, level) for level in LEVELS if level.machine == machine and level.flags <= flags)
    return next((path for path in fitting if path.exists()), None)


def ship(folder: Path, machine: str) -> list[str]:
    """The names of the levels that were compiled into the folder: all of the architecture. Raises OSError, SubprocessError."""
    folder.mkdir(parents=True, exist_ok=True)
    levels = [level for level in LEVELS if level.machine == machine]
    for level in levels:
        compile_to(shipped_path(folder, level), level.options)
    return [level.name for level in levels]


def reason(error: Exception) -> str:
    """Why nothing was compiled."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"g++ failed: {str(error.stderr)[-300:]}"
    return "there is no g++" if isinstance(error, FileNotFoundError) else str(error)


if __name__ == "__main__":
    try:
        print(*ship(Path(sys.argv[1]), platform.machine()))
    except (OSError, subprocess.SubprocessError) as failure:
        sys.exit(reason(failure))
