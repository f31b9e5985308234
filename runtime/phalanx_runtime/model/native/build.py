"""Compiles the C++ kernels with g++, without torch.

`python3 -m phalanx_runtime.model.native.build FOLDER` compiles all instruction sets of this architecture for an image.
"""

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "built"
"""Kernels in an image."""
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 900.0
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_BF16_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set: required CPU flags and g++ options."""

    name: str
    machine: str
    options: tuple[str, ...]
    flags: frozenset[str]


INSTRUCTION_SETS = (
    InstructionSet("x86-64-v4-vbmi", "x86_64", (*_BF16_OPTIONS, "-mavx512vbmi"), _BF16 | {"avx512vbmi"}),
    InstructionSet("x86-64-v4-bf16", "x86_64", _BF16_OPTIONS, _BF16),
    InstructionSet("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    InstructionSet("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    InstructionSet("armv8-a", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
)
"""Best first. Other processors use torch."""


def source_key(*more: str) -> str:
    """Returns a hash of sources, options and `more`."""
    digest = hashlib.sha256(repr((FLAGS, *more)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compile_to(path: Path, options: tuple[str, ...]) -> None:
    """Compiles atomically. Raises OSError, SubprocessError."""
    part = path.with_suffix(f".{os.getpid()}.part")
    command = ["g++", *FLAGS, *options, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(part)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    part.replace(path)


def prebuilt_path(folder: Path, target: InstructionSet) -> Path:
    """Returns the path for the current sources."""
    return folder / f"{target.name}-{source_key(*target.options)}.so"


def find_prebuilt(folder: Path, machine: str, flags: frozenset[str]) -> Path | None:
    """Returns the best kernels in the folder, if any."""
    supported = (target for target in INSTRUCTION_SETS if target.machine == machine and target.flags <= flags)
    paths = (prebuilt_path(folder, target) for target in supported)
    return next((path for path in paths if path.exists()), None)


def prebuild(folder: Path, machine: str) -> list[str]:
    """Compiles and returns all instruction sets of an architecture. Raises OSError, SubprocessError."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = [target for target in INSTRUCTION_SETS if target.machine == machine]
    for target in targets:
        compile_to(prebuilt_path(folder, target), target.options)
    return [target.name for target in targets]


def failure_reason(error: Exception) -> str:
    """Describes a compilation failure."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"g++ failed: {str(error.stderr)[-300:]}"
    return "there is no g++" if isinstance(error, FileNotFoundError) else str(error)


if __name__ == "__main__":
    try:
        print(*prebuild(Path(sys.argv[1]), platform.machine()))
    except (OSError, subprocess.SubprocessError) as failure:
        sys.exit(failure_reason(failure))
