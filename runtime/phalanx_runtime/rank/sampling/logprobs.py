"""Logprobs of tokens, and of the most probable ones beside them: log_softmax of the model's scores as they are.

Penalties, masks, temperature and filters change nothing here. Rows are taken in parts, so that the memory this needs beside the
scores does not grow with their number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_api.wire import TokenDetail

PART_SCORES = 1 << 22
"""Scores that are normalised at once: 16 MiB of float32. Fewer cost calls, more cost memory."""


def rows_at_once(vocab_size: int) -> int:
    """How many rows of scores are looked at together."""
    return max(1, PART_SCORES // vocab_size)


def token_details(
    scores: Tensor, tokens: Sequence[int], tops: Sequence[int], rows: Sequence[int] | None = None
) -> list[TokenDetail]:
    """The detail of one token for each row. scores: [rows, vocabulary], raw. `tops[i]`: how many of the best beside.

    rows: which of the scores' rows the tokens belong to; None means all, in their order.
    """
    size = rows_at_once(scores.shape[1])
    details: list[TokenDetail] = []
    for first in range(0, len(tokens), size):
        part = slice(first, first + size)
        some = scores[part] if rows is None else scores[torch.tensor(rows[part], device=scores.device)]
        details += _part_details(some, tokens[part], tops[part])
    return details


def _part_details(scores: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenDetail]:
    wide = scores if scores.dtype == torch.float64 else scores.float()
    logprobs = wide.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=scores.device).unsqueeze(1))
    ranks = (logprobs > own).sum(1).tolist()
    values, ids = logprobs.topk(min(max(tops), scores.shape[1]))
    told = zip(own.squeeze(1).tolist(), ranks, ids.tolist(), values.tolist(), tops, strict=True)
    return [
        TokenDetail(logprob=logprob, rank=rank, top_ids=best[:top], top_logprobs=those[:top])
        for logprob, rank, best, those, top in told
    ]
