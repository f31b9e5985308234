"""Maps attention calls of a `transformers` model to layers of the paged KV cache."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.attention.page_format import hadamard_transform
from phalanx_runtime.model.attention.paged import Attention, AttentionParams, LayerCache, StepBatch
from phalanx_runtime.model.generic.indexed import Choice, Indexer, Inputs, choose_keys
from phalanx_runtime.model.generic.latent import latent_of
from phalanx_runtime.model.protocol import KvLayout

SINKS = "s_aux"
"""Argument of attention calls: [heads], see `AttentionParams.sinks`."""
CHOICE = "indices"
"""Argument of attention calls: see `Choice`."""
SLOPES = "alibi_slopes"
"""Argument of attention calls: [heads], see `AttentionParams.slopes`."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call in a forward pass."""

    heads: int
    kv_heads: int
    dim: int
    """Padded dimension of keys and values."""
    window: int | None
    block: int | None = None
    has_slopes: bool = False
    is_latent: bool = False
    """The keys are latents (`generic.latent`), and the values too."""


UNUSED_DIM = 16
"""Head dimension of the only layer of pages without attention."""


def kv_layout(calls: list[AttentionCall]) -> KvLayout:
    """Returns one layer per call, with equal KV heads. Raises Unsupported.

    Without calls it is one small layer that nothing uses: requests are counted in pages.
    """
    if not calls:
        return KvLayout(1, (UNUSED_DIM,), (None,), is_unused=True)
    kv_heads = max(call.kv_heads for call in calls)
    for call in calls:
        if kv_heads % call.kv_heads or call.heads % kv_heads:
            raise Unsupported(f"its layers have {call.kv_heads} and {kv_heads} KV heads, of {call.heads} heads")
    kinds = {call.is_latent for call in calls}
    if len(kinds) > 1:
        raise Unsupported("only some of its layers have latents")
    blocks, windows = {call.block for call in calls} - {None}, tuple(call.window for call in calls)
    has_blocks = len(blocks) == 1 and not any(windows)
    return KvLayout(
        kv_heads,
        tuple(call.dim for call in calls),
        tuple(call.block for call in calls) if has_blocks else windows,
        has_blocks=has_blocks,
        is_latent=kinds == {True},
    )


class PagedHandler:
    """Computes the calls of one step by paged attention."""

    def __init__(
        self, calls: list[AttentionCall], kv: KvLayout, attention: Attention, batch: StepBatch, caches: list[LayerCache]
    ) -> None:
        self._calls = calls
        self._kv = kv
        self._attention = attention
        self._batch = batch
        self._caches = caches
        self._next = 0

    def choose(self, indexer: Indexer, inputs: Inputs) -> Choice:
        """See `Chooser`."""
        return choose_keys(self._batch, indexer, inputs, self._take()[1])

    def _take(self) -> tuple[AttentionCall, LayerCache, StepBatch]:
        """Returns the next layer of the pages, once these may be used, and the step for it."""
        call, cache = self._calls[self._next], self._caches[self._next]
        batch = self._batch.of(self._kv.windows[self._next])
        self._next += 1
        if self._batch.await_pages is not None:
            self._batch.await_pages(cache)
        return call, cache, batch

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """See `CallHandler`."""
        call, cache, batch = self._take()
        latent = latent_of(module)
        if latent is not None:
            attended = self._attend(latent.absorb(q, k), k, v, call=call, cache=cache, batch=batch, options=options)
            return latent.project(attended if cache.format is None else hadamard_transform(attended))
        return self._attend(q, k, v, call=call, cache=cache, batch=batch, options=options)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        call: AttentionCall,
        cache: LayerCache,
        batch: StepBatch,
        options: dict[str, Any],
    ) -> Tensor:
        repeat = self._kv.kv_heads // call.kv_heads
        packed = [_packed(part, call.dim) for part in (q, k, v)]
        keys, values = (part.repeat_interleave(repeat, 1) if repeat > 1 else part for part in packed[1:])
        sinks = None if options.get(SINKS) is None else options[SINKS].to(q.dtype)
        params = AttentionParams(
            call.window,
            logit_scale(q, options),
            options.get("softcap"),
            sinks=sinks,
            slopes=options.get(SLOPES),
            block=call.block,
            chosen=choice.keys if isinstance(choice := options.get(CHOICE), Choice) else None,
        )
        out = self._attention(packed[0], keys, values, cache=cache, batch=batch, params=params)
        return out.view(1, q.shape[2], q.shape[1], call.dim)[..., : v.shape[-1]].contiguous()

    def check_complete(self) -> None:
        """Raises RuntimeError after fewer calls than layers."""
        if self._next != len(self._calls):
            raise RuntimeError(f"the model called attention {self._next} times instead of {len(self._calls)}")


def logit_scale(q: Tensor, options: dict[str, Any]) -> float:
    """Returns the scale of a call. q: [..., dim]."""
    scale = options.get("scaling")
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _packed(part: Tensor, dim: int) -> Tensor:
    """Converts [1, heads, tokens, own dim] to [tokens, heads, dim]."""
    packed = part[0].transpose(0, 1)
    return F.pad(packed, (0, dim - part.shape[-1])) if part.shape[-1] < dim else packed.contiguous()


def attend_densely(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, options: dict[str, Any]) -> Tensor:
    """Reference attention over one whole request. Shapes: see `CallHandler`."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.matmul(q, keys.transpose(-1, -2)) * logit_scale(q, options)
    if (softcap := options.get("softcap")) is not None:
        logits = torch.tanh(logits / softcap) * softcap
    index = torch.arange(q.shape[2], device=q.device)
    distance = index[None, :] - index[:, None]
    if (slopes := options.get(SLOPES)) is not None:
        logits = logits + slopes[:, None, None] * distance
    is_masked = (distance > 0) | (distance <= -(call.window or len(index)))
    if call.block is not None:
        is_masked |= index[None, :] < (index - index % call.block)[:, None]
    if isinstance(choice := options.get(CHOICE), Choice):
        is_masked = is_masked | ~choice.keys[0]
    logits = logits.masked_fill(is_masked, float("-inf"))
    if (sinks := options.get(SINKS)) is not None:
        logits = torch.cat((logits, sinks.to(q.dtype)[:, None, None].expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1)[..., : len(index)]
    return torch.matmul(weights, values).transpose(1, 2).contiguous()


PAGED = "phalanx"
"""Implementation in `transformers` that calls the handler of the running thread."""
PROBED = "phalanx_probe"
"""The same; the model also builds masks, which carry their rules."""
MASKED = "phalanx_masked"
"""The same; the model gets masks of one element, which its code wants and nothing uses."""


class CallHandler(Protocol):
    """Computes attention calls."""

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, own dims]. Returns [1, tokens, heads, dim of v].

        Of a module with a `latent_of`, k and v are its latents; the dimension returned is that of its own values.
        """
        ...


class _ThreadState(threading.local):
    handler: CallHandler | None = None


_thread_state = _ThreadState()


@contextmanager
def handle_calls(handler: CallHandler | None) -> Iterator[None]:
    """Uses `handler` for all attention calls in the running thread; without one, the model's own attention runs."""
    previous, _thread_state.handler = _thread_state.handler, handler
    try:
        yield
    finally:
        _thread_state.handler = previous


def running_handler() -> CallHandler | None:
    """Returns the handler of the running thread."""
    return _thread_state.handler


def register() -> None:
    """Registers both implementations."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBED, _attend)
    AttentionInterface.register(MASKED, _attend)
    AttentionMaskInterface.register(PROBED, probe_mask)
    AttentionMaskInterface.register(MASKED, lambda *_, **__: torch.ones(1, 1, 1, 1, dtype=torch.bool))


def _attend(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    handler = running_handler()
    if handler is None:
        raise RuntimeError("attention was called outside of a step")
    return handler(module, query, key, v=value, mask=attention_mask, options=options), None


class ProbeMask(Tensor):
    """Boolean mask [1, 1, queries, keys] with its rule."""

    rule: Any


def probe_mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """Builds a mask with its rule. Returns [batch_size, 1, q_length, kv_length]."""
    mask = visibility(mask_function, torch.arange(q_length), kv_length).expand(batch_size, 1, q_length, kv_length)
    probe = mask.as_subclass(ProbeMask)
    probe.rule = mask_function
    return probe


def visibility(rule: Any, queries: Tensor, kv_length: int) -> Tensor:
    """Evaluates a rule to a boolean mask [queries, keys]."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(kv_length)
    mask = rule(zero, zero, queries[:, None], keys[None, :])
    return torch.as_tensor(mask, dtype=torch.bool).expand(len(queries), kv_length)
