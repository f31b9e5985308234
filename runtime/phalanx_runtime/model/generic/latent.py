"""Pages of latents, for multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Such attention projects one latent of a token to the keys and values of all heads; one rotated vector is part of the keys of all
heads too. A page has both, [latent rotated], as the key of the only KV head, and that key is the value as well. So that no key
or value of a head is made, both projections are absorbed, with W_K and W_V their rows for a head:

    q_nope . (W_K latent) = (W_K^T q_nope) . latent        sum of weight * (W_V latent) = W_V (sum of weight * latent)

In `transformers` each attention module has a method that expands latents, which `LatentProjection` replaces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPANSION = "expand_kv"
"""The method: from latents and rotated vectors, [1, 1, tokens, dim] each, to keys and values of heads."""
PROJECTION = "kv_b_proj"
"""The linear of all heads, whose rows are those of the keys of a head, then of its values, then of the next head."""
SPLITS = {"q_proj": "colwise", "q_b_proj": "colwise", PROJECTION: "colwise", "o_proj": "rowwise"}
"""Tensor parallel: heads are split, and each rank has all of the latent. The plans of `transformers` omit it for some classes."""


class LatentProjection:
    """Returns latents in place of keys and values while attention is paged; does what the module's attention needs with them."""

    __slots__ = ("_absorbed", "_expand", "_is_paged", "_module", "_rank")

    def __init__(self, module: Any, is_paged: Callable[[], bool]) -> None:
        """`is_paged`: whether attention is paged now, or the module's own."""
        self._module = module
        self._expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = getattr(module, EXPANSION)
        self._is_paged = is_paged
        self._rank = int(getattr(module, PROJECTION).in_features)
        self._absorbed: tuple[Tensor, Tensor] | None = None
        """W_K and W_V of all heads, [heads, own dims, rank]; products with a part of the linear's weights would copy it."""

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values: the latent with the rotated vector, twice, or those of all heads."""
        if not self._is_paged():
            return self._expand(latent, rotated)
        key = torch.cat((latent, rotated), -1)
        return key, key

    def expand(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all heads, [1, heads, tokens, own dims], from [1, 1, tokens, dim]. Before `release`."""
        return self._expand(key[..., : self._rank], key[..., self._rank :])

    def absorb(self, q: Tensor, key: Tensor) -> Tensor:
        """Returns queries for latents, [1, heads, tokens, dim of a key], from the module's."""
        nope = q.shape[-1] - (key.shape[-1] - self._rank)
        if self._absorbed is None:
            weight = getattr(self._module, PROJECTION).weight.view(q.shape[1], -1, self._rank)
            self._absorbed = weight[:, :nope].contiguous(), weight[:, nope:].contiguous()
        return torch.cat((torch.matmul(q[..., :nope], self._absorbed[0]), q[..., nope:]), -1)

    def project(self, attended: Tensor) -> Tensor:
        """Returns attention over keys and values, [1, tokens, heads, dim of a value], from that over latents, after `absorb`."""
        assert self._absorbed is not None, "queries were absorbed"
        values = torch.matmul(attended[..., : self._rank].transpose(1, 2), self._absorbed[1].transpose(1, 2))
        return values.transpose(1, 2).contiguous()

    def release(self) -> None:
        """Frees the linear, after the first `absorb`: paged attention alone may follow."""
        linear = getattr(self._module, PROJECTION)
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def keep_latents(model: nn.Module, is_paged: Callable[[], bool]) -> dict[str, str]:
    """Makes modules with latents give them to paged attention. Returns the split of their linears over ranks, by name."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        projection = getattr(module, PROJECTION, None)
        if hasattr(module, EXPANSION) and isinstance(projection, nn.Linear) and projection.bias is None:
            setattr(module, EXPANSION, LatentProjection(module, is_paged))
            plan |= {f"{name}.{part}": split for part, split in SPLITS.items() if getattr(module, part, None) is not None}
    return plan


def latent_of(module: object) -> LatentProjection | None:
    """Returns the projection of an attention module whose latents are kept."""
    found = getattr(module, EXPANSION, None)
    return found if isinstance(found, LatentProjection) else None


def is_absorbed(model: nn.Module, name: str) -> bool:
    """Whether attention over latents absorbs the weight of this linear."""
    path, _, leaf = name.rpartition(".")
    return leaf == PROJECTION and latent_of(model.get_submodule(path)) is not None


def release_projections(model: nn.Module) -> None:
    """Frees the linears whose weights are absorbed."""
    for module in model.modules():
        latent = latent_of(module)
        if latent is not None:
            latent.release()
