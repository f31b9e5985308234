"""Speculation with draft trees, and limits of step sizes."""

from phalanx_api.speculation import Method, Tree, TreeShape
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from tests.runtime.equality.requests import ROOMY

LIMITS: dict[str, tuple[Limits, int]] = {
    "together": (ROOMY, 200),
    "chunks of 7": (Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=26), 200),
    "preempted": (Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64), 11),
}


def make_config(
    method: Method, shape: TreeShape = "best_first", widths: tuple[int, ...] = (3, 2), most: int = 8
) -> SchedulerConfig:
    tree = Tree(list(widths), shape)
    return SchedulerConfig(
        speculation=SpeculationConfig(
            method=method, num_tokens=most, is_adaptive=False, draft_methods=frozenset({method}), tree=tree
        )
    )
