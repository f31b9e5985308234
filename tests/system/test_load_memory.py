"""Memory of a loading rank: at most its share of the weights plus one shard, for any checkpoint size."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx_runtime.checkpoint.folder import INDEX
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.linear.linear import can_pack
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from phalanx_runtime.model.protocol import LoadOptions, Model
from phalanx_runtime.model.source import ModelImpl, open_model
from phalanx_runtime.rank.loader import prepare_process
from phalanx_runtime.rank.memory.memory_profiler import HostMemoryProfiler
from phalanx_runtime.rank.process.cgroup import System
from tests.runtime.pods import make_spec
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
MIB = 1 << 20
SHARD_BYTES = 24 * MIB
PROCESS_BYTES = 16 * MIB
"""Other memory: one matrix while it is packed, code that runs for the first time, rotary angles, allocation rounding."""


class OneOfTwo(SoloCollective):
    """One of two ranks; loading needs no peer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class LoadMemory:
    """Memory of one rank's process, in bytes."""

    peak: int
    """Most that loading took."""
    share: int
    """Weights of the rank."""


def load_and_print(folder: Path, rank: int, level: ModelImpl, first: Path) -> None:
    """Runs in a separate process, which loads a tiny model first: code that runs for the first time is not counted."""
    cpu = torch.device("cpu")
    kernels = Kernels(packed=can_pack(torch.float32))
    prepare_process(make_spec(folder), System())
    make_linear(torch.zeros(64, 64), None, kernels)(torch.zeros(1, 64))  # starts the library's threads
    form = LoadOptions(dtype=torch.float32, device=cpu, kernels=kernels, positions=256)
    open_model(first, level).load(SoloCollective(), form)
    source = open_model(folder, level)
    models: list[Model] = []
    peak = HostMemoryProfiler().peak_bytes(lambda: models.append(source.load(OneOfTwo(rank), form)))
    print(json.dumps({"peak": peak, "share": models[0].num_bytes}))


def measure(folder: Path, rank: int, level: ModelImpl, first: Path) -> LoadMemory:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__, str(folder), str(rank), level, str(first)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return LoadMemory(**json.loads(completed.stdout.splitlines()[-1]))


def split(folder: Path) -> list[int]:
    """Splits a checkpoint file into shards and returns their sizes."""
    whole = folder / "model.safetensors"
    shards: list[dict[str, torch.Tensor]] = [{}]
    with safe_open(whole, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).clone()
            if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES and shards[-1]:
                shards.append({})
            shards[-1][name] = tensor
    whole.unlink()
    names = {f"model-{at:05d}.safetensors": shard for at, shard in enumerate(shards)}
    for file_name, shard in names.items():
        save_file(shard, folder / file_name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file for file, shard in names.items() for name in shard}}))
    return [(folder / name).stat().st_size for name in names]


DENSE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "vocab_size": 6144,
    "head_dim": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {**DENSE, "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 8, "num_attention_heads": 8}
CASES: dict[str, tuple[str, ModelImpl, dict[str, Any]]] = {
    "fused": ("llama", "fused", DENSE),
    "transformers": ("llama", "transformers", DENSE),
    "transformers with experts": ("mixtral", "transformers", EXPERTS),
}


@pytest.mark.parametrize(("family", "level", "sizes"), CASES.values(), ids=CASES.keys())
def test_a_rank_loads_within_its_share_and_one_shard(
    tmp_path: Path, family: str, level: ModelImpl, sizes: dict[str, Any]
) -> None:
    folder, first = save_tiny(tmp_path / "model", family, **sizes), save_tiny(tmp_path / "first", family)
    shards = split(folder)
    total = sum(shards)
    assert total > 150 * MIB and max(shards) <= SHARD_BYTES + MIB and len(shards) > 5
    for rank in (0, 1) if level == "fused" else (1,):  # transformers takes long to start
        memory = measure(folder, rank, level, first)
        assert 0.49 * total < memory.share < 0.52 * total
        assert memory.share - 2 * MIB < memory.peak < memory.share + max(shards) + PROCESS_BYTES, memory


if __name__ == "__main__":
    load_and_print(Path(sys.argv[1]), int(sys.argv[2]), cast(ModelImpl, sys.argv[3]), Path(sys.argv[4]))
