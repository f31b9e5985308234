"""A move of a request between large models without a device, on fake tensors: the copies of its pages, and its next step."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.rank.memory.page_memory import Pages, open_pages
from tests.runtime.model.gpu.launches import NoWaits, launches_of
from tests.runtime.rank.device.fake_decoders import LLAMA_8B, QWEN3_600M
from tests.runtime.rank.device.fake_rank import PAGE, SAMPLING, FakeRank

configs = pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_600M], ids=["llama 8b", "qwen3 0.6b"])


class FakeStream:
    """Runs the copies at once; they may not wait."""

    def __init__(self, device: torch.device) -> None:
        self.num_runs = 0

    def run(self, copies: Callable[[], None]) -> None:
        self.num_runs += 1
        with NoWaits():
            copies()


def opened(caches: list[LayerCache]) -> tuple[Pages, FakeStream]:
    stream = FakeStream(caches[0].k.device)
    return open_pages(caches, make_stream=lambda device: stream), stream


@configs
def test_pages_are_copied_beside_steps(config: ModelConfig) -> None:
    """Keys and values of each layer: one copy per page, all queued on the stream of the connection."""
    with FakeTensorMode():
        source, target = FakeRank(config), FakeRank(config)
    sends, receives = opened(source.caches), opened(target.caches)
    pages = (sends[0], receives[0])
    assert pages[0].page_bytes == 2 * config.num_layers * config.num_kv_heads * PAGE * config.head_dim * 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        launches = Counter(launches_of(lambda: pages[1].write(7, memoryview(bytes(pages[0].page_bytes)))))
        launches += Counter(launches_of(lambda: pages[0].read(5)))
    assert launches == {"aten::copy_": 4 * config.num_layers}
    assert sends[1].num_runs == receives[1].num_runs == 1


@configs
def test_a_moved_request_continues_in_a_captured_step(config: ModelConfig) -> None:
    """At the target its pages are in the plan of its first step, which is a decode step beside the two that run there."""
    with FakeTensorMode():
        target = FakeRank(config)
        plan = StepPlan(
            step=2,
            admitted=[NewRow(2, SAMPLING, 90)],
            rows=[0, 1, 2],
            starts=[40, 40, 100],
            counts=[1, 1, 1],
            pages=[[], [], list(range(20, 27))],
            tokens=[9, 9, 8],
            draws=[(0, 1), (1, 1), (2, 10)],
        )
        target.run(plan)
    assert dict(target.step.graphs.num_replays) == {4: 1} and not target.step.graph_obstacles["draws"]
