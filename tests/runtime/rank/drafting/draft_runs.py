"""Requests served with draft tokens of a fixed length."""

from pathlib import Path
from typing import Any

from phalanx_api import wire
from phalanx_api.speculation import Method
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.requests import ROOMY
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve


def make_config(method: Method, num_tokens: int = 4) -> SchedulerConfig:
    """Returns a config with `num_tokens` draft tokens in each step."""
    return SchedulerConfig(
        speculation=SpeculationConfig(method=method, num_tokens=num_tokens, is_adaptive=False, draft_methods=frozenset({method}))
    )


def run(
    folder: Path, submitted: list[wire.Request], setup: Build, config: SchedulerConfig, limits: Limits = ROOMY, pods: Any = (1,)
) -> tuple[list[Served], CountingRunner]:
    """Serves the requests on a group. Returns their answers and the counts of its steps."""

    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits, config), counter

    return on_ranks(folder, pods, setup, work)
