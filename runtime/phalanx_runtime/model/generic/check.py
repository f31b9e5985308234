"""Checks that a loaded model is supported, on a few tokens, and records its attention calls.

Packed requests share a forward pass, so tokens may interact through attention only: if each token attends to itself, permuted
tokens and positions must give permuted logits. Pipeline stages receive random hidden states.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.attention.bias import causal_mask
from phalanx_runtime.model.generic.indexed import Choice, Indexer, Inputs
from phalanx_runtime.model.generic.latent import latent_of
from phalanx_runtime.model.generic.layers import (
    PROBED,
    SINKS,
    SLOPES,
    AttentionCall,
    CallHandler,
    ProbeMask,
    attend_densely,
    handle_calls,
    visibility,
)
from phalanx_runtime.model.generic.part import Part
from phalanx_runtime.model.states.check import check_states
from phalanx_runtime.model.states.step import StepRows


def find_window(mask: Tensor | None, call_window: int | None, positions: int) -> int | None:
    """Returns the sliding window of a call, if any. Raises Unsupported. `call_window` serves for masks without a rule.

    mask: [..., queries, keys].
    """
    rule = getattr(mask, "rule", None)
    if isinstance(mask, ProbeMask) and rule is not None:
        with suppress(IndexError):  # a rule that reads the input, such as pictures in it
            return _evaluate_rule(rule, positions)
    window = None if call_window is None or call_window >= positions else int(call_window)
    if mask is not None:
        _check_mask(mask, window)
    return window


def find_block(mask: Tensor | None, positions: int) -> int | None:
    """Returns the size of the blocks within which tokens attend, if the mask's rule has any.

    mask: [..., queries, keys].
    """
    rule = getattr(mask, "rule", None)
    if not isinstance(mask, ProbeMask) or rule is None:
        return None
    with suppress(IndexError):
        sees_first = visibility(rule, torch.arange(positions), 1)[:, 0]
        block = int(sees_first.int().argmin())  # the first token of the second block
        if not block:
            return None
        queries = torch.tensor(sorted({block, min(block + 1, positions - 1), positions // 2, positions - 1}))
        keys = torch.arange(positions)[None, :]
        expected = (keys <= queries[:, None]) & (keys >= (queries - queries % block)[:, None])
        if torch.equal(visibility(rule, queries, positions), expected):
            return block
    return None


def _evaluate_rule(rule: Any, positions: int) -> int | None:
    """Evaluates the rule for the last two tokens and those at 1/2 and 1/3."""
    queries = torch.tensor(sorted({positions - 1, max(positions - 2, 0), positions // 2, positions // 3}))
    mask = visibility(rule, queries, positions)
    size = int(mask[-1].sum())
    keys = torch.arange(positions)[None, :]
    expected = (keys <= queries[:, None]) & (keys > queries[:, None] - size)
    if size < 1 or not torch.equal(mask, expected):
        raise Unsupported("its mask is neither causal nor a sliding window")
    return None if size >= positions else size


def _check_mask(mask: Tensor, window: int | None) -> None:
    size = mask.shape[-2]
    is_visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    keys, queries = torch.arange(mask.shape[-1])[None, :], torch.arange(size)[:, None]
    expected = (keys <= queries) & (keys > queries - (window or size))
    has_bias = mask.dtype != torch.bool and bool((mask[is_visible] != 0).any())
    if mask.shape[-1] != size or has_bias or not bool((is_visible == expected.to(mask.device)).all()):
        raise Unsupported("its attention has a bias or an unknown mask")


NUM_TOKENS = 24
SUPPORTED_ARGUMENTS = frozenset(
    {
        "dropout",
        "scaling",
        "sliding_window",
        SINKS,
        SLOPES,
        "softcap",
        "is_causal",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "logits_to_keep",
    }
)
"""Supported arguments of attention calls."""


class Probe:
    """Reference attention that records its calls."""

    def __init__(self, positions: int) -> None:
        self.calls: list[AttentionCall] = []
        self._positions = positions
        self._choice: Choice | None = None
        """Of an indexer that has no layer of pages yet."""

    def choose(self, indexer: Indexer, inputs: Inputs) -> Choice:
        """See `Chooser`."""
        mask = causal_mask(inputs[0].shape[1], inputs[0])
        self._choice = Choice({0: indexer.choose(inputs, mask[None])[0]}, indexer.dim)
        return self._choice

    def __call__(self, module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """See `CallHandler`."""
        unsupported = [name for name, value in options.items() if name not in SUPPORTED_ARGUMENTS and _has_effect(value)]
        if unsupported:
            raise Unsupported(f"its attention takes {', '.join(sorted(unsupported))}")
        if q.shape[2] != k.shape[2]:
            raise Unsupported("its attention includes tokens outside the step")
        if q.shape[1] % k.shape[1]:
            raise Unsupported(f"its {q.shape[1]} heads do not share {k.shape[1]} KV heads evenly")
        causal = options.get("is_causal")
        if mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise Unsupported("its attention is not causal")
        block = find_block(mask, self._positions)
        window = find_window(mask, options.get("sliding_window"), self._positions) if block is None else None
        latent = latent_of(module)
        dim, has_slopes = max(q.shape[-1], v.shape[-1]), options.get(SLOPES) is not None
        call = AttentionCall(q.shape[1], k.shape[1], dim, window=window, block=block, has_slopes=has_slopes)
        if latent is not None:
            call = replace(call, dim=k.shape[-1], is_latent=True)
        if self._choice is not None:
            if latent is None or window is not None or block is not None:
                raise Unsupported("its queries choose keys that are no latents, or within a window or a block")
            self.calls.append(replace(call, dim=self._choice.dim))  # the index keys come first
            self._choice = None
        self.calls.append(call)
        if latent is None:
            return attend_densely(q, k, v, call, options)
        expanded = attend_densely(q, *latent.expand(k), call=call, options=options)
        if not _is_close(expanded, latent.project(attend_densely(latent.absorb(q, k), k, v, call, options))):
            raise Unsupported("its attention over latents gives other results than that over its keys and values")
        return expanded


def _has_effect(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def attend_to_self(module: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Returns each token's own value. Shapes: see `CallHandler`."""
    latent = latent_of(module)
    if latent is not None:
        v = latent.expand(k)[1]
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


_NOT_ONLY_HIDDEN = "pipeline parallel: its layers pass more than hidden states"


@torch.inference_mode()
def probe(
    part: Part,
    positions: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    own_attention: str | None,
    *,
    peers: Collective,
) -> list[AttentionCall]:
    """Returns the calls of a forward pass; collective. Raises Unsupported.

    `own_attention`: the implementation to compare with; split layers cannot run one.
    """
    size = min(NUM_TOKENS, positions)
    # Without the padding token, which precedes the first position: by default it has no position of its own.
    kinds = torch.tensor([token for token in range(vocab_size) if token != part.first_position - 1])
    tokens = kinds[torch.randint(0, len(kinds), (size,), generator=torch.Generator().manual_seed(0))].to(device)
    index = torch.arange(size, device=device)
    _check_stage(part, tokens, index, dtype)
    states = _random_states(part, size, device, dtype)
    handler, one = Probe(positions), StepRows((0,), (0,), (size,))
    part.mixers.records = True
    logits = _forward(part, tokens, positions=index, handler=handler, implementation=PROBED, stage_input=states, rows=one)
    part.mixers.records = False
    check_states(part.mixers, device, peers)
    calls = list(handler.calls)
    if not calls and not part.mixers.mixers:
        raise Unsupported("its attention does not go through AttentionInterface")
    default = _forward(part, tokens, positions=None, handler=handler, implementation=PROBED, stage_input=states, rows=one)
    if not _is_close(default, logits):
        raise Unsupported("its positions do not start at 0")
    _check_order(part, tokens, index, states)
    if own_attention is not None:
        own = _forward(part, tokens, positions=index, handler=None, implementation=own_attention, stage_input=states)
        if not _is_close(own, logits):
            raise Unsupported("its own attention gives other logits")
    set_attention(part.model, part.implementation)
    return calls


def _check_order(part: Part, tokens: Tensor, index: Tensor, states: Tensor | None) -> None:
    """Checks that tokens of requests of their own have the same logits in any order."""
    size = len(tokens)
    each = StepRows(range(size), [0] * size, [1] * size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).to(tokens.device)

    def logits(at: Tensor) -> Tensor:
        stage_input = None if states is None else states[at]
        options: dict[str, Any] = {"handler": attend_to_self, "implementation": part.implementation}
        return _forward(part, tokens[at], positions=index[at], stage_input=stage_input, rows=each, **options)

    if not _is_close(logits(index)[order], logits(order)):
        raise Unsupported("its tokens interact, or depend on their order, outside of attention")


def _check_stage(part: Part, tokens: Tensor, index: Tensor, dtype: torch.dtype) -> None:
    """Checks that only hidden states pass between layers, and whether in tuples."""
    if part.stage.count == 1:
        return
    size, device = len(tokens), tokens.device
    states = [_random_states(part, size, device, dtype, seed) for seed in (1, 2)]

    def run(tokens: Tensor, stage_input: Tensor | None, embeds: Tensor | None = None) -> Tensor:
        return _forward(
            part,
            tokens,
            positions=index,
            handler=attend_to_self,
            implementation=part.implementation,
            stage_input=stage_input,
            embeds=embeds,
        )

    try:
        run(tokens, states[0])
    except Unsupported:  # another reason raises again
        part.return_tuples()
        run(tokens, states[0])
    inputs = list(part.other_inputs)
    run(tokens.flip(0), states[1])
    if not _is_equal(inputs, part.other_inputs):
        raise Unsupported(_NOT_ONLY_HIDDEN)
    if states[0] is not None:
        outputs = [run(tokens, states[0], embeds) for embeds in states]
        if not torch.equal(*outputs):
            raise Unsupported(_NOT_ONLY_HIDDEN)


def _is_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _random_states(part: Part, size: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor | None:
    if part.stage.is_first:
        return None
    return torch.randn(size, part.width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def set_attention(model: Any, implementation: str) -> None:
    """Sets the attention implementation of all parts of the model, also where its code would not use another one."""
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            config._attn_implementation = implementation


def _forward(
    part: Part,
    tokens: Tensor,
    positions: Tensor | None,
    handler: CallHandler | None,
    implementation: str,
    stage_input: Tensor | None,
    embeds: Tensor | None = None,
    rows: StepRows | None = None,
) -> Tensor:
    try:
        set_attention(part.model, implementation)
        with handle_calls(handler):
            return part.forward(tokens, positions, stage_input, embeds, rows)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"its forward pass fails on packed tokens: {type(error).__name__}: {error}") from error


def _is_close(reference: Tensor, other: Tensor) -> bool:
    """Whether logits differ only by rounding in their dtype."""
    # transformers computes softmax and norms in fp32 even in float64.
    limit = 1e-3 if reference.dtype in (torch.float32, torch.float64) else 0.2
    difference = (reference.double() - other.double()).abs().max()
    return bool(difference <= limit * reference.double().std())
