"""What a loaded model asks of attention, and whether we may answer: found by running it on a few tokens.

Packed requests share a forward pass, so tokens may act on one another through attention alone. That is tried: where every token
attends to itself, tokens in another order, with their positions, must give the same scores in that order.

A stage of a pipeline is tried alike, with hidden states drawn at random in place of those of the stage before it. Nothing but
hidden states may go from layer to layer: what else a layer is told depends on positions alone.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic.layers import PAGED, PROBED, Answer, Call, ProbeMask, answered_by, attend_densely, visible
from phalanx_runtime.model.generic.part import Part

# What a mask lets a token see: all before it, a window of it, or something that paged attention cannot do.


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
"""Arguments of a call to attention that we follow, or that change nothing here."""


class Probe:
    """Answers like the definition, and keeps what each call was like."""

    def __init__(self, positions: int) -> None:
        self.calls: list[Call] = []
        self._positions = positions

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """q: [1, heads, tokens, dim]; k, v: [1, kv_heads, tokens, dims of their own]. Gives [1, tokens, heads, dim of v]."""
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
    """Every token's own value."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


_MORE = "pipeline parallel: more than hidden states goes from layer to layer"


@torch.inference_mode()
def probe(part: Part, positions: int, vocab_size: int, device: torch.device, dtype: torch.dtype, whole: bool) -> list[Call]:
    """The calls of one forward pass. Raises Unsupported, with the reason, for a model that we cannot compute.

    whole: this rank holds its layers whole, so that their own attention can run beside ours.
    """
    size = min(NUM_TOKENS, positions)
    tokens = torch.randint(0, vocab_size, (size,), generator=torch.Generator().manual_seed(0)).to(device)
    at = torch.arange(size, device=device)
    _check_cut(part, tokens, at, dtype)
    before = _states(part, size, device, dtype)
    answer = Probe(positions)
    ours = _forward(part, tokens, at, answer, PROBED, before)
    calls = list(answer.calls)
    if not calls:
        raise Unsupported("its attention does not go through AttentionInterface")
    if not _close(_forward(part, tokens, None, answer, PROBED, before), ours):
        raise Unsupported("it numbers the tokens of a request otherwise than from 0")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(device)
    alone = _forward(part, tokens, at, attend_to_self, PAGED, before)
    mixed = _forward(part, tokens[order], at[order], attend_to_self, PAGED, None if before is None else before[order])
    if not _close(alone[order], mixed):
        raise Unsupported("its tokens act on one another, or know their place, outside of attention")
    if whole and not _close(_forward(part, tokens, at, answer, "eager", before), ours):
        raise Unsupported("its own attention gives other scores than ours")
    use(part.model, PAGED)
    return calls


def _check_cut(part: Part, tokens: Tensor, at: Tensor, dtype: torch.dtype) -> None:
    """Finds how layers hand on hidden states, and tries that nothing else goes from layer to layer."""
    if part.stage.count == 1:
        return
    size, device = len(tokens), tokens.device
    states = [_states(part, size, device, dtype, seed) for seed in (1, 2)]
    try:
        _forward(part, tokens, at, attend_to_self, PAGED, states[0])
    except Unsupported:  # if it is for another reason, it is raised again
        part.give_tuples()
        _forward(part, tokens, at, attend_to_self, PAGED, states[0])
    told = list(part.others)
    _forward(part, tokens.flip(0), at, attend_to_self, PAGED, states[1])
    if not _same(told, part.others):
        raise Unsupported(_MORE)
    if states[0] is not None:
        outs = [_forward(part, tokens, at, attend_to_self, PAGED, states[0], embeds) for embeds in states]
        if not _same(*([out] for out in outs)):
            raise Unsupported(_MORE)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _states(part: Part, size: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor | None:
    """Hidden states to try a stage with; None for the first, which makes its own."""
    if part.stage.is_first:
        return None
    return torch.randn(size, part.width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def use(model: Any, implementation: str) -> None:
    """Lets the model call this attention."""
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
    use(part.model, implementation)
    try:
        with answered_by(answer):
            return part.forward(tokens, positions, before, embeds)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"its forward pass fails on packed tokens: {type(error).__name__}: {error}") from error


def _close(reference: Tensor, other: Tensor) -> bool:
    """Whether scores differ by rounding only, of their dtype."""
    # transformers computes softmax and norms in fp32 where all else is in float64.
    limit = 1e-3 if reference.dtype in (torch.float32, torch.float64) else 0.2
    difference = (reference.double() - other.double()).abs().max()
    return bool(difference <= limit * reference.double().std())
