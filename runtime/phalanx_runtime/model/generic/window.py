"""What a mask lets a token see: all before it, a window of it, or something that paged attention cannot do."""

from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic.calls import ProbeMask, visible


def window_of(mask: Tensor | None, asked: int | None, positions: int) -> int | None:
    """The sliding window of a call with this mask, None where attention is full. Raises Unsupported for any other mask.

    asked: the window that the call names; it counts where there is no mask whose rule can be asked.
    """
    rule = getattr(mask, "rule", None)
    if isinstance(mask, ProbeMask) and rule is not None:
        return _window_of_rule(rule, positions)
    window = None if asked is None or asked >= positions else int(asked)
    if mask is not None:
        _check_mask(mask, window)
    return window


def _window_of_rule(rule: Any, positions: int) -> int | None:
    """The rule is asked about four tokens: the last two, one at the half and one at a third."""
    queries = torch.tensor(sorted({positions - 1, max(positions - 2, 0), positions // 2, positions // 3}))
    seen = visible(rule, queries, positions)
    size = int(seen[-1].sum())
    keys = torch.arange(positions)[None, :]
    wanted = (keys <= queries[:, None]) & (keys > queries[:, None] - size)
    if size < 1 or not torch.equal(seen, wanted):
        raise Unsupported("its mask is neither causal nor a sliding window")
    return None if size >= positions else size


def _check_mask(mask: Tensor, window: int | None) -> None:
    """A mask that the model made by itself must be the causal one, boolean or additive."""
    size = mask.shape[-2]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys, queries = torch.arange(mask.shape[-1])[None, :], torch.arange(size)[:, None]
    wanted = (keys <= queries) & (keys > queries - (window or size))
    additive = mask.dtype != torch.bool and bool((mask[seen] != 0).any())
    if mask.shape[-1] != size or additive or not bool((seen == wanted.to(mask.device)).all()):
        raise Unsupported("it adds to scores or masks them in a way of its own")
