"""Checks that a loaded model is supported, by running it on a few tokens, and records its calls to attention.

Packed requests share a forward pass, so tokens may interact through attention only. The test: where every token attends to itself
only, permuted tokens with permuted positions must give permuted logits.

A pipeline stage is tested alike, with random hidden states as its input. Layers may pass only hidden states to the next layer:
their other inputs must depend on positions alone.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic.layers import PAGED, PROBED, Answer, Call, ProbeMask, answered_by, attend_densely, visible
from phalanx_runtime.model.generic.part import Part

# Masks: causal, sliding window, or unsupported.


def window_of(mask: Tensor | None, asked: int | None, positions: int) -> int | None:
    """Sliding window of a call with this mask; None for full attention. Raises Unsupported for any other mask.

    asked: the call's own window, used if the mask has no rule.
    """
    rule = getattr(mask, "rule", None)
    if isinstance(mask, ProbeMask) and rule is not None:
        return _window_of_rule(rule, positions)
    window = None if asked is None or asked >= positions else int(asked)
    if mask is not None:
        _check_mask(mask, window)
    return window


def _window_of_rule(rule: Any, positions: int) -> int | None:
    """Evaluates the rule for four tokens: the last two, one at 1/2 and one at 1/3."""
    queries = torch.tensor(sorted({positions - 1, max(positions - 2, 0), positions // 2, positions // 3}))
    seen = visible(rule, queries, positions)
    size = int(seen[-1].sum())
    keys = torch.arange(positions)[None, :]
    wanted = (keys <= queries[:, None]) & (keys > queries[:, None] - size)
    if size < 1 or not torch.equal(seen, wanted):
        raise Unsupported("its mask is neither causal nor a sliding window")
    return None if size >= positions else size


def _check_mask(mask: Tensor, window: int | None) -> None:
    """Raises Unsupported unless a mask without a rule is the causal one, boolean or additive."""
    size = mask.shape[-2]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys, queries = torch.arange(mask.shape[-1])[None, :], torch.arange(size)[:, None]
    wanted = (keys <= queries) & (keys > queries - (window or size))
    additive = mask.dtype != torch.bool and bool((mask[seen] != 0).any())
    if mask.shape[-1] != size or additive or not bool((seen == wanted.to(mask.device)).all()):
        raise Unsupported("it adds to scores or masks them in a way of its own")


NUM_TOKENS = 24
HARMLESS = frozenset(
    {
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "is_causal",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "logits_to_keep",
    }
)
"""Arguments of an attention call that are supported or have no effect here."""


class Probe:
    """Attention by its definition; records each call."""

    def __init__(self, positions: int) -> None:
        self.calls: list[Call] = []
        self._positions = positions

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, own dims]. Returns [1, tokens, heads, dim of v]."""
        strange = [name for name, value in options.items() if name not in HARMLESS and _counts(value)]
        if strange:
            raise Unsupported(f"its attention takes {', '.join(sorted(strange))}")
        if q.shape[2] != k.shape[2]:
            raise Unsupported("its attention is over other tokens than those of the step")
        if q.shape[1] % k.shape[1]:
            raise Unsupported(f"its {q.shape[1]} heads do not share {k.shape[1]} KV heads evenly")
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise Unsupported("its attention is not causal")
        window = window_of(mask, options.get("sliding_window"), self._positions)
        self.calls.append(Call(q.shape[1], k.shape[1], max(q.shape[-1], v.shape[-1]), window))
        return attend_densely(q, k, v, window, options)


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def attend_to_self(module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Returns every token's own value."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


_MORE = "pipeline parallel: more than hidden states goes from layer to layer"


@torch.inference_mode()
def probe(part: Part, positions: int, vocab_size: int, device: torch.device, dtype: torch.dtype, whole: bool) -> list[Call]:
    """Calls of one forward pass. Raises Unsupported, with the reason, for an unsupported model.

    whole: this rank has complete layers, so that the model's own attention can be run for comparison.
    """
    size = min(NUM_TOKENS, positions)
    tokens = torch.randint(0, vocab_size, (size,), generator=torch.Generator().manual_seed(0)).to(device)
    at = torch.arange(size, device=device)
    _check_cut(part, tokens, at, dtype)
    before = _states(part, size, device, dtype)
    answer = Probe(positions)
    ours = _forward(part, tokens, positions=at, answer=answer, implementation=PROBED, before=before)
    calls = list(answer.calls)
    if not calls:
        raise Unsupported("its attention does not go through AttentionInterface")
    if not _close(_forward(part, tokens, positions=None, answer=answer, implementation=PROBED, before=before), ours):
        raise Unsupported("it numbers the tokens of a request otherwise than from 0")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(device)
    alone = _forward(part, tokens, positions=at, answer=attend_to_self, implementation=PAGED, before=before)
    mixed = _forward(
        part,
        tokens[order],
        positions=at[order],
        answer=attend_to_self,
        implementation=PAGED,
        before=None if before is None else before[order],
    )
    if not _close(alone[order], mixed):
        raise Unsupported("its tokens act on one another, or know their place, outside of attention")
    if whole and not _close(_forward(part, tokens, positions=at, answer=answer, implementation="eager", before=before), ours):
        raise Unsupported("its own attention gives other scores than ours")
    set_attention(part.model, PAGED)
    return calls


def _check_cut(part: Part, tokens: Tensor, at: Tensor, dtype: torch.dtype) -> None:
    """Determines how layers return hidden states, and checks that nothing else passes between layers."""
    if part.stage.count == 1:
        return
    size, device = len(tokens), tokens.device
    states = [_states(part, size, device, dtype, seed) for seed in (1, 2)]
    try:
        _forward(part, tokens, positions=at, answer=attend_to_self, implementation=PAGED, before=states[0])
    except Unsupported:  # any other reason raises again below
        part.give_tuples()
        _forward(part, tokens, positions=at, answer=attend_to_self, implementation=PAGED, before=states[0])
    told = list(part.others)
    _forward(part, tokens.flip(0), positions=at, answer=attend_to_self, implementation=PAGED, before=states[1])
    if not _same(told, part.others):
        raise Unsupported(_MORE)
    if states[0] is not None:
        outs = [
            _forward(part, tokens, positions=at, answer=attend_to_self, implementation=PAGED, before=states[0], embeds=embeds)
            for embeds in states
        ]
        if not _same(*([out] for out in outs)):
            raise Unsupported(_MORE)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _states(part: Part, size: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor | None:
    """Random input of a stage; None for the first stage."""
    if part.stage.is_first:
        return None
    return torch.randn(size, part.width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def set_attention(model: Any, implementation: str) -> None:
    """Sets the model's attention implementation."""
    model.set_attn_implementation(implementation)


def _forward(
    part: Part,
    tokens: Tensor,
    positions: Tensor | None,
    answer: Answer,
    implementation: str,
    before: Tensor | None,
    embeds: Tensor | None = None,
) -> Tensor:
    set_attention(part.model, implementation)
    try:
        with answered_by(answer):
            return part.forward(tokens, positions, before, embeds)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"its forward pass fails on packed tokens: {type(error).__name__}: {error}") from error


def _close(reference: Tensor, other: Tensor) -> bool:
    """Whether logits differ only by rounding in their dtype."""
    # transformers computes softmax and norms in fp32 where all else is in float64.
    limit = 1e-3 if reference.dtype in (torch.float32, torch.float64) else 0.2
    difference = (reference.double() - other.double()).abs().max()
    return bool(difference <= limit * reference.double().std())
