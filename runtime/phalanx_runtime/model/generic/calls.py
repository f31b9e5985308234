"""The calls that a `transformers` model makes to its attention, answered by us.

The model runs under the attention implementation `phalanx`, which asks the answer that is set for the running thread. Under
`phalanx_probe` the model also makes its masks, and each call tells what it attends to.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

PAGED = "phalanx"
PROBED = "phalanx_probe"


class Answer(Protocol):
    """What a call to attention gives."""

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, dims of their own]. Gives [1, tokens, heads, dim of v]."""
        ...


class _Running(threading.local):
    answer: Answer | None = None


_running = _Running()


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Lets this answer every call that the running thread's models make to attention."""
    before, _running.answer = _running.answer, answer
    try:
        yield
    finally:
        _running.answer = before


def register() -> None:
    """Makes both implementations known to `transformers`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBED, _attend)
    AttentionMaskInterface.register(PROBED, probe_mask)


def _attend(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    if _running.answer is None:
        raise RuntimeError("attention was called outside of a step")
    return _running.answer(module, query, key, value, attention_mask, options), None


class ProbeMask(Tensor):
    """A boolean mask [1, 1, queries, keys] that remembers the rule it came from."""

    rule: Any


def probe_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """The mask of this rule, which it keeps."""
    mask = visible(mask_function, torch.arange(q_length), kv_length).expand(batch_size, 1, q_length, kv_length)
    probe = mask.as_subclass(ProbeMask)
    probe.rule = mask_function
    return probe


def visible(rule: Any, queries: Tensor, kv_length: int) -> Tensor:
    """Which of the keys each of these queries sees: [queries, keys], boolean."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(kv_length)
    seen = rule(zero, zero, queries[:, None], keys[None, :])
    return torch.as_tensor(seen, dtype=torch.bool).expand(len(queries), kv_length)
