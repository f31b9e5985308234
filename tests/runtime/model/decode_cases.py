"""Steps of decodes over random pages."""

import torch

from phalanx_runtime.model.attention.paged import Attention, AttentionParams, DecodeBand, LayerCache, StepBatch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def case(lengths: list[int], page: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> "Case":
    """A step of decodes over random pages with random content."""
    chance = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    counts = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=chance)
    cache = LayerCache(noise(len(pages), kv_heads, page, dim), noise(len(pages), kv_heads, page, dim))
    tables = torch.stack([pages[sum(counts[:i]) :][: max(counts)].clone().resize_(max(counts)) for i in range(len(lengths))])
    for row, count in enumerate(counts):
        tables[row, count:] = tables[row, 0]
    at = torch.tensor(lengths) - 1
    slots = tables[torch.arange(len(lengths)), at // page, None] * kv_heads + torch.arange(kv_heads)
    slots = (slots * page + (at % page)[:, None]).reshape(-1)
    empty = torch.empty(0, dtype=torch.int64)
    band = DecodeBand(
        start=0,
        size=len(lengths),
        cache_rows=empty,
        masks={},
        tables=tables,
        lengths=lengths,
        device_lengths=torch.tensor(lengths),
    )
    batch = StepBatch(tokens=empty, positions=empty, slots=slots, bands=[band], chunks=[], logits_indices=empty)
    return Case(noise(len(lengths), heads + 1, dim), noise(len(lengths), kv_heads, dim), cache, batch)


class Case:
    """Queries are a slice of a wider tensor, as after the fused linear."""

    def __init__(self, wide: torch.Tensor, k: torch.Tensor, cache: LayerCache, batch: StepBatch) -> None:
        self.q, self.k, self.cache, self.batch = wide[:, :-1], k, cache, batch

    def attended(self, attention: Attention, params: AttentionParams) -> torch.Tensor:
        return attention(self.q, self.k, -self.k, self.cache, self.batch, params)
