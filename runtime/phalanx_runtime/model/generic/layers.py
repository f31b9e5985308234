"""Attention calls of a `transformers` model as layers of the paged KV cache."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.attention.paged import Attention, AttentionForm, LayerCache, StepBatch
from phalanx_runtime.model.protocol import KvLayout


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call in a forward pass. `dim`: padded dimension of keys and values; `window`: sliding window or None."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None


def layout_of(calls: list[Call]) -> KvLayout:
    """KV layout with one layer per call. Raises Unsupported when the numbers of KV heads cannot be unified."""
    most = max(call.kv_heads for call in calls)
    for call in calls:
        if most % call.kv_heads or call.heads % most:
            raise Unsupported(f"its layers have {call.kv_heads} and {most} KV heads, of {call.heads} heads")
    return KvLayout(most, tuple(call.dim for call in calls), frozenset(call.window for call in calls))


class PagedAnswer:
    """Answers the calls of one step in order, with paged attention."""

    def __init__(self, calls: list[Call], kv: KvLayout, attention: Attention, batch: StepBatch, caches: list[LayerCache]) -> None:
        self._calls = calls
        self._kv = kv
        self._attention = attention
        self._batch = batch
        self._caches = caches
        self._next = 0

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, own dims]. Returns [1, tokens, heads, dim of v]."""
        call, cache = self._calls[self._next], self._caches[self._next]
        self._next += 1
        repeat = self._kv.kv_heads // call.kv_heads
        packed = [_packed(part, call.dim) for part in (q, k, v)]
        keys, values = (part.repeat_interleave(repeat, 1) if repeat > 1 else part for part in packed[1:])
        form = AttentionForm(call.window, scale_of(q, options), options.get("softcap"))
        out = self._attention(packed[0], keys, values, cache=cache, batch=self._batch, form=form)
        return out.view(1, q.shape[2], q.shape[1], call.dim)[..., : v.shape[-1]].contiguous()

    def check_complete(self) -> None:
        """Raises RuntimeError when the step made fewer calls than the model has layers."""
        if self._next != len(self._calls):
            raise RuntimeError(f"the model called attention {self._next} times instead of {len(self._calls)}")


def scale_of(q: Tensor, options: dict[str, Any]) -> float:
    """Scale of the attention scores in a call."""
    scale = options.get("scaling")
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _packed(part: Tensor, dim: int) -> Tensor:
    """Reshapes [1, heads, tokens, own dim] to [tokens, heads, dim], zero-padded."""
    packed = part[0].transpose(0, 1)
    return F.pad(packed, (0, dim - part.shape[-1])) if part.shape[-1] < dim else packed.contiguous()


def attend_densely(q: Tensor, k: Tensor, v: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Attention by its definition, over a step of one whole request. Returns [1, tokens, heads, dim of v]."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, keys.transpose(-1, -2)) * scale_of(q, options)
    if (softcap := options.get("softcap")) is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(q.shape[2], device=q.device)
    hidden = (at[None, :] > at[:, None]) | (at[None, :] <= at[:, None] - (window or len(at)))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.matmul(weights, values).transpose(1, 2).contiguous()


# Attention implementations registered with `transformers`. `phalanx` calls the running thread's answer; `phalanx_probe` also
# makes
# the model build its masks, which then carry their rules.

PAGED = "phalanx"
PROBED = "phalanx_probe"


class Answer(Protocol):
    """Computes an attention call."""

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, own dims]. Returns [1, tokens, heads, dim of v]."""
        ...


class _Running(threading.local):
    answer: Answer | None = None


_running = _Running()


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Uses `answer` for every attention call of models in the running thread."""
    before, _running.answer = _running.answer, answer
    try:
        yield
    finally:
        _running.answer = before


def register() -> None:
    """Registers both implementations with `transformers`."""
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
    return _running.answer(module, query, key, v=value, mask=attention_mask, options=options), None


class ProbeMask(Tensor):
    """A boolean mask [1, 1, queries, keys] with the rule that produced it."""

    rule: Any


def probe_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """Builds the mask of a rule, and attaches the rule."""
    mask = visible(mask_function, torch.arange(q_length), kv_length).expand(batch_size, 1, q_length, kv_length)
    probe = mask.as_subclass(ProbeMask)
    probe.rule = mask_function
    return probe


def visible(rule: Any, queries: Tensor, kv_length: int) -> Tensor:
    """Mask [queries, keys] of a rule, boolean: true where a query sees a key."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(kv_length)
    seen = rule(zero, zero, queries[:, None], keys[None, :])
    return torch.as_tensor(seen, dtype=torch.bool).expand(len(queries), kv_length)
