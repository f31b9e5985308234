"""Loads the only rank of a group in this process, without a server."""

from pathlib import Path
from typing import Any

import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.rank.loader import choose_device, load_rank, prepare_process
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import RankReady, RankSpec


def load_alone(
    model: Path, num_threads: int | None = None, draft_dir: str = "", draft_exit: str = "", **settings: Any
) -> tuple[ModelRunner, RankReady, torch.device]:
    """Returns the runner, its `RankReady` and its device. Sets this process's threads. `settings`: fields of `EngineConfig`."""
    spec = RankSpec(
        rank=0,
        world_size=1,
        local_world_size=1,
        local_rank=0,
        incarnation=1,
        hosts=["127.0.0.1"],
        base_port=0,
        token="00",
        model_dir=str(model),
        num_threads=num_threads,
        draft_dir=draft_dir,
        draft_exit=draft_exit,
        engine=EngineConfig(**settings),
    )
    system = System()
    prepare_process(spec, system)
    device = choose_device(spec)
    return *load_rank(spec, SoloCollective(), device, system), device
