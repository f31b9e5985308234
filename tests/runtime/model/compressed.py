"""Pages of a test in a compressed format."""

import torch

from phalanx_runtime.model.attention.feedback import Feedback, KvRounding, make_feedback
from phalanx_runtime.model.attention.page_format import FORMATS, encode
from phalanx_runtime.model.attention.paged import LayerCache, transform


def compress(cache: LayerCache, name: str) -> LayerCache:
    """Returns the same pages in the format; slots with NaN have codes and scales of NaN's bits."""
    format = FORMATS[name]
    parts = []
    for part, is_key in ((cache.k, True), (cache.v, False)):
        wide = part.float()
        is_unknown = wide.isnan()
        wide = wide.nan_to_num()
        codes, scales = encode(format, transform(wide, wide, LayerCache(wide, wide, format=format))[1] if is_key else wide)
        codes[is_unknown[..., : codes.shape[-1]]] = 0x7F
        scales[is_unknown[..., :1].expand_as(scales)] = float("nan")
        parts.append((codes, scales))
    (k, k_scales), (v, v_scales) = parts
    return LayerCache(k, v, k_scales, v_scales, format=format)


def copied(cache: LayerCache) -> LayerCache:
    """Returns a copy."""
    return LayerCache(*(part.clone() for part in cache.tensors), format=cache.format, rounding=cache.rounding)


def same_pages(one: LayerCache, other: LayerCache) -> bool:
    """Whether all bytes are equal."""
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def make_rounding(dim: int, seed: int = 0, kv_heads: int = 2) -> KvRounding:
    """Returns the rounding of heads whose moments have large and small directions, and a shift."""
    rng = torch.Generator().manual_seed(seed)

    def feedback() -> Feedback:
        mix = torch.randn(kv_heads, dim, dim, generator=rng) * torch.logspace(1, -1, dim)
        return make_feedback(torch.randn(kv_heads, dim, generator=rng), mix @ mix.transpose(1, 2))

    return KvRounding(feedback(), feedback())
