"""What a loaded model asks of attention, and whether we may answer: found by running it on a few tokens.

Packed requests share a forward pass, so tokens may act on one another through attention alone. That is tried: where every token
attends to itself, tokens in another order, with their positions, must give the same scores in that order.
"""

from typing import Any

import torch
from torch import Tensor, nn

from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic.calls import PAGED, PROBED, Answer, answered_by
from phalanx_runtime.model.generic.layers import Call, attend_densely
from phalanx_runtime.model.generic.window import window_of

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


@torch.inference_mode()
def probe(model: nn.Module, positions: int, vocab_size: int, device: torch.device, whole: bool) -> list[Call]:
    """The calls of one forward pass. Raises Unsupported, with the reason, for a model that we cannot compute.

    whole: this rank holds the whole model, so that its own attention can run beside ours.
    """
    size = min(NUM_TOKENS, positions)
    tokens = torch.randint(0, vocab_size, (size,), generator=torch.Generator().manual_seed(0)).to(device)
    at = torch.arange(size, device=device)
    answer = Probe(positions)
    ours = _forward(model, tokens, at, answer, PROBED)
    calls = list(answer.calls)
    if not calls:
        raise Unsupported("its attention does not go through AttentionInterface")
    if not _close(_forward(model, tokens, None, answer, PROBED), ours):
        raise Unsupported("it numbers the tokens of a request otherwise than from 0")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(device)
    alone = _forward(model, tokens, at, attend_to_self, PAGED)
    mixed = _forward(model, tokens[order], at[order], attend_to_self, PAGED)
    if not _close(alone[order], mixed):
        raise Unsupported("its tokens act on one another, or know their place, outside of attention")
    if whole and not _close(_forward(model, tokens, at, answer, "eager"), ours):
        raise Unsupported("its own attention gives other scores than ours")
    use(model, PAGED)
    return calls


def forward(model: nn.Module, tokens: Tensor, positions: Tensor | None, **options: Any) -> Tensor:
    """Scores of these packed tokens: [tokens kept, vocabulary]. Without positions the model numbers them itself."""
    if positions is not None:
        options["position_ids"] = positions[None]
    out: Tensor = model(tokens[None], use_cache=False, return_dict=True, **options).logits
    return out[0]


def use(model: Any, implementation: str) -> None:
    """Lets the model call this attention."""
    model.set_attn_implementation(implementation)


def _forward(model: nn.Module, tokens: Tensor, positions: Tensor | None, answer: Answer, implementation: str) -> Tensor:
    use(model, implementation)
    try:
        with answered_by(answer):
            return forward(model, tokens, positions)
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
