"""While a rank loads, its memory stays under its own share of the weights plus one shard, whatever the checkpoint's size."""

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

from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.linear.linear import can_pack
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from phalanx_runtime.model.protocol import Form, Model
from phalanx_runtime.model.source import Level, open_model
from phalanx_runtime.model.weights import INDEX
from phalanx_runtime.rank.loader import prepare_process
from phalanx_runtime.rank.memory.memory_profiler import HostMemoryProfiler
from phalanx_runtime.rank.process.cgroup import System
from tests.runtime.pods import make_spec
from tests.runtime.tiny import save_tiny

pytestmark = pytest.mark.system
MIB = 1 << 20
SHARD_BYTES = 24 * MIB
OF_THE_PROCESS = 16 * MIB
"""What loading takes beside: one matrix while it is packed, code that runs for the first time, angles, the kernel's rounding."""


class OneOfTwo(SoloCollective):
    """One of two ranks while it loads, which takes no other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank's process says: the most that loading took, and the bytes of its weights."""

    peak: int
    share: int


def load_and_tell(folder: Path, rank: int, level: Level, first: Path) -> None:
    """In a process of its own, which loaded a tiny model of the kind before: code that runs for the first time is no weight."""
    cpu = torch.device("cpu")
    kernels = Kernels(packed=can_pack(torch.float32))
    prepare_process(make_spec(folder), System())
    make_linear(torch.zeros(64, 64), None, kernels)(torch.zeros(1, 64))  # the library's own code and threads
    form = Form(dtype=torch.float32, device=cpu, kernels=kernels, positions=256)
    open_model(first, level).load(SoloCollective(), form)
    source = open_model(folder, level)
    kept: list[Model] = []
    peak = HostMemoryProfiler().peak(lambda: kept.append(source.load(OneOfTwo(rank), form)))
    print(json.dumps({"peak": peak, "share": kept[0].num_bytes}))


def loaded(folder: Path, rank: int, level: Level, first: Path) -> Loaded:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__, str(folder), str(rank), level, str(first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return Loaded(**json.loads(done.stdout.splitlines()[-1]))


def split(folder: Path) -> list[int]:
    """Cuts the one file of a checkpoint into shards, and gives their sizes."""
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
LOADED: dict[str, tuple[str, Level, dict[str, Any]]] = {
    "fused": ("llama", "fused", DENSE),
    "of transformers": ("llama", "transformers", DENSE),
    "of transformers, with experts": ("mixtral", "transformers", EXPERTS),
}


@pytest.mark.parametrize(("family", "level", "sizes"), LOADED.values(), ids=LOADED.keys())
def test_a_rank_loads_within_its_share_and_one_shard(tmp_path: Path, family: str, level: Level, sizes: dict[str, Any]) -> None:
    folder, first = save_tiny(tmp_path / "model", family, **sizes), save_tiny(tmp_path / "first", family)
    shards = split(folder)
    total = sum(shards)
    assert total > 150 * MIB and max(shards) <= SHARD_BYTES + MIB and len(shards) > 5
    for rank in (0, 1) if level == "fused" else (1,):  # transformers takes long to start
        told = loaded(folder, rank, level, first)
        assert 0.49 * total < told.share < 0.52 * total
        assert told.share - 2 * MIB < told.peak < told.share + max(shards) + OF_THE_PROCESS, told


if __name__ == "__main__":
    load_and_tell(Path(sys.argv[1]), int(sys.argv[2]), cast(Level, sys.argv[3]), Path(sys.argv[4]))
