"""A rank with the device path, on fake tensors of a GPU: within a `FakeTensorMode`."""

from dataclasses import replace

from phalanx_api import wire
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import NewRow, PoolShape, StepPlan
from phalanx_runtime.model.attention.page_format import PageFormat
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.rank.device.decode_graphs import CaptureBudget
from phalanx_runtime.rank.device.limits import DeviceLimits
from phalanx_runtime.rank.device.loading import open_device_step
from phalanx_runtime.rank.device.pending_step import PendingStep
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from phalanx_runtime.rank.step.pooling import Pooler
from tests.runtime.model.gpu.fakes import fake_rounding
from tests.runtime.model.gpu.launches import NoWaits
from tests.runtime.rank.device.fake_decoders import ALONE, DEVICE, DTYPE, POSITIONS, make_decoder
from tests.runtime.rank.device.recorded_ops import RecordedOps, ReplayedGraph

NUM_ROWS = 4
PAGE = 16
POOL = PoolShape(2048, PAGE)
SAMPLING = wire.Sampling(max_tokens=50, seed=3, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01)
PENALTIES = wire.Sampling(max_tokens=50, seed=4, repetition_penalty=1.2, logit_bias={7: 1.0}, allowed_token_ids=[5, 6, 7])


class FakeRank:
    """A rank with the device path. Two rows decode from position 40 on; the plans of a test continue them."""

    def __init__(
        self,
        config: ModelConfig,
        peers: Collective = ALONE,
        format: PageFormat | None = None,
        max_loras: int = 0,
        *,
        is_calibrated: bool = False,
        num_rows: int = NUM_ROWS,
    ) -> None:
        decoder = make_decoder(config, peers, max_loras=max_loras)
        if is_calibrated:
            roundings = [fake_rounding(decoder.kv.kv_heads, dim) for dim in decoder.kv.head_dims]
            decoder.kv = replace(decoder.kv, roundings=tuple(roundings))
        self.caches = caches = make_caches(decoder.kv, POOL.num_pages, PAGE, DTYPE, DEVICE, format)
        self.adapters = decoder.adapters
        self.builder = BatchBuilder(CacheShape(PAGE, decoder.kv.kv_heads, 1 << 10), DTYPE, DEVICE, has_adapters=max_loras > 0)
        self.sampler = TorchSampler(config.vocab_size)
        self.captured: list[RecordedOps] = []
        limits = DeviceLimits(num_rows, POSITIONS, CaptureBudget(1 << 40, 1000.0), lambda: ReplayedGraph(self.captured))
        self.step = open_device_step(
            decoder, caches, POOL, self.builder, self.sampler, pooler=Pooler(decoder), peers=peers, limits=limits
        )
        rows = [NewRow(0, SAMPLING), NewRow(1, PENALTIES, 2, [1, 2], adapter=max_loras)]
        prompts = {"starts": [0, 0], "counts": [40, 40], "pages": [[0, 1, 2], [3, 4, 5]], "tokens": [9] * 80}
        self.run(StepPlan(step=1, admitted=rows, rows=[0, 1], draws=[(0, 0), (1, 0)], **prompts))  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> PendingStep:
        """Queues a step as `ModelRunner` does."""
        for new in plan.admitted:
            self.sampler.admit(new)
        self.builder.update(plan)
        self.step.update(plan)
        with NoWaits():
            assert self.step.can_launch(plan), self.step.obstacles
            pending = self.step.launch(plan)
        assert pending is not None
        return pending
