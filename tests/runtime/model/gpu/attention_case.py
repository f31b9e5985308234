"""A step of random runs, attended by the kernels and by `DenseAttention`; on the GPU, or in the interpreter without one."""

import torch

from phalanx_api import wire
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.gpu import AttentionLaunch
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, StepBatch, transform, write_pages
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.model.compressed import compress

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = tuple[int, int]
"""Tokens of a request before the step and in the step."""


class Case:
    """A step of random runs over random pages. `trees`: parents of the last tokens, by request."""

    def __init__(
        self,
        runs: list[Run],
        *,
        trees: dict[int, list[int]] | None = None,
        page: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        dim: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        format: str | None = None,
    ) -> None:
        chance = torch.Generator().manual_seed(seed)
        needed = [-(-(before + count) // page) for before, count in runs]
        pages = torch.randperm(sum(needed) + 3, generator=chance).tolist()
        tables = [pages[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(runs))]
        paths = [DraftPath(request=i, depth=len(parents), parents=parents) for i, parents in (trees or {}).items()]
        plan = StepPlan(
            step=1,
            admitted=[],
            rows=list(range(len(runs))),
            starts=[before for before, _ in runs],
            counts=[count for _, count in runs],
            pages=tables,
            tokens=[0] * sum(count for _, count in runs),
            draws=[],
            paths=paths,
        )
        builder = BatchBuilder(CacheShape(page, kv_heads, 1 << 10), dtype, DEVICE)
        builder.params = {row: NewRow(row, wire.Sampling(max_tokens=1, seed=0)) for row in plan.rows}
        self.batch: StepBatch = builder.tensors(_updated(builder, plan))
        tokens = sum(count for _, count in runs)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance).to(DEVICE, dtype)

        self.q = noise(tokens, kv_heads * group + 1, dim)[:, :-1]
        self.k, self.v = noise(tokens, kv_heads, dim), noise(tokens, kv_heads, dim)
        self.cache = LayerCache(*(noise(len(pages), kv_heads, page, dim) for _ in range(2)))
        if format is not None:
            self.compress(format)

    def compress(self, format: str) -> None:
        """Rounds the pages."""
        self.cache = compress(self.cache, format)

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's keys and values by the reference; returns queries and keys as the pages store keys."""
        q, k = transform(self.q, self.k, self.cache)
        write_pages(k, self.v, self.cache, self.batch.slots)
        return q, k

    def attended(self, q: torch.Tensor, params: AttentionParams, max_splits: int = 1) -> torch.Tensor:
        """Returns the result of the kernels, after the keys were written."""
        segments, out = self.batch.segments(), torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        launch = AttentionLaunch(q=q, out=out, cache=self.cache, segments=segments, params=params)
        launch.run(max_splits)
        return out

    def check(self, params: AttentionParams, max_splits: int = 1) -> None:
        q, k = self.written()
        cache = LayerCache(self.cache.k.float(), self.cache.v.float()) if self.cache.format is None else self.cache
        reference = DenseAttention()
        expected = reference(q.float(), k.float(), self.v.float(), cache=cache, batch=self.batch, params=params, is_written=True)
        result = self.attended(q, params, max_splits)
        tolerance = 1e-5 if result.dtype == torch.float32 else 4e-3
        found = result.float().reshape(len(self.q), -1)
        torch.testing.assert_close(found, expected.reshape(len(self.q), -1), rtol=tolerance, atol=tolerance)


def _updated(builder: BatchBuilder, plan: StepPlan) -> StepPlan:
    builder.update(plan)
    return plan
