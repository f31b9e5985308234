"""Which part of a layer with states a rank computes: heads, groups or channels.

Each state is that of the rank's own part, so it is divided too. A layer of another class, or one that the ranks do not divide
evenly, is computed whole by each rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from phalanx_runtime.model.partition import Span

Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class NormGroup:
    """A group of channels whose norm several ranks compute together."""

    index: int
    count: int
    size: int
    """Channels of a whole group."""


@dataclass(frozen=True, slots=True)
class MixerCut:
    """One rank's part of a layer with states."""

    rows: Mapping[str, Spans]
    """Places of parameters, and of all parameters of linears and convolutions, in their first dimension of more than one."""
    inputs: Mapping[str, Span]
    """Input columns of linears, whose outputs the ranks add."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the part that the code of the layer reads."""
    vectors: Mapping[str, Spans] = field(default_factory=dict)
    """Places of buffers in their last dimension."""
    norm_group: NormGroup | None = None
    """Of `norm`, if the rank has only a part of a group."""


def cut_mixer(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """Returns the part of a rank, or None if each rank computes the whole layer."""
    cut = _KINDS.get(type(module).__name__)
    return None if cut is None else cut(module, rank, world_size)


def norm_over_ranks(norm: Any, group: NormGroup, all_reduce: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Returns a gated RMS norm of this rank's channels, with the mean square of the whole group."""
    gates_last = getattr(norm, "norm_before_gate", False)

    def compute(hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        x, factor = hidden.float(), 1.0 if gate is None else silu(gate.float())
        x = x if gates_last else x * factor
        sums = x.new_zeros((*x.shape[:-1], group.count))
        sums[..., group.index] = x.pow(2).sum(-1)
        mean = all_reduce(sums)[..., group.index, None] / group.size
        x = x * torch.rsqrt(mean + norm.variance_epsilon)
        scaled: Tensor = norm.weight * x * factor if gates_last else norm.weight * x.to(hidden.dtype)
        return scaled.to(hidden.dtype)

    return compute


def _even(size: int, rank: int, world_size: int) -> Span:
    return Span(rank * size // world_size, (rank + 1) * size // world_size)


def _times(span: Span, unit: int) -> Span:
    return Span(span.start * unit, span.stop * unit)


def _after(offset: int, *spans: Span) -> Spans:
    return tuple(Span(offset + span.start, offset + span.stop) for span in spans)


def _mamba2(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """By heads. Ranks whose heads are of the same group have the same inputs of its state."""
    num_heads, num_groups, inner = module.num_heads, module.n_groups, module.intermediate_size
    if num_heads % world_size or (num_groups % world_size and world_size % num_groups) or inner != num_heads * module.head_dim:
        return None
    heads = _even(num_heads, rank, world_size)
    first = rank * num_groups // world_size
    groups = Span(first, first + max(1, num_groups // world_size))
    own, size = _times(heads, module.head_dim), num_groups * module.ssm_state_size
    shared = _times(groups, module.ssm_state_size)
    conv = (own, *_after(inner, shared), *_after(inner + size, shared))
    projected = (own, *_after(inner, *conv), *_after(2 * inner + 2 * size, heads))
    is_part = num_groups < world_size
    norm = getattr(module, "norm", None)
    return MixerCut(
        rows={
            "in_proj": projected,
            "conv1d": conv,
            "dt_bias": (heads,),
            "A_log": (heads,),
            "D": (heads,),
            **({} if norm is None else {"norm": (own,)}),
        },
        inputs={"out_proj": own},
        numbers={
            "num_heads": heads.size,
            "n_groups": groups.size,
            "intermediate_size": own.size,
            "conv_dim": sum(span.size for span in conv),
            "norm.n_groups": groups.size,
        },
        vectors={"mup_vector": projected},
        norm_group=NormGroup(first, num_groups, inner // num_groups) if is_part and norm is not None else None,
    )


def _mamba(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """By inner channels. The ranks add the inputs of the state, which all channels have in common."""
    inner = module.intermediate_size
    if inner % world_size:
        return None
    own = _even(inner, rank, world_size)
    return MixerCut(
        rows={"in_proj": (own, *_after(inner, own)), "conv1d": (own,), "dt_proj": (own,), "A_log": (own,), "D": (own,)},
        inputs={"x_proj": own, "out_proj": own},
        numbers={"intermediate_size": own.size},
    )


def _short_convolution(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """By channels."""
    size = module.out_proj.weight.shape[1]
    if size % world_size:
        return None
    own = _even(size, rank, world_size)
    return MixerCut(rows={"in_proj": (own, *_after(size, own), *_after(2 * size, own)), "conv": (own,)}, inputs={"out_proj": own})


def _delta_net(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """By key heads, with their value heads."""
    if module.num_k_heads % world_size or module.num_v_heads % module.num_k_heads:
        return None
    heads = _even(module.num_k_heads, rank, world_size)
    values = _times(heads, module.num_v_heads // module.num_k_heads)
    key, value = _times(heads, module.head_k_dim), _times(values, module.head_v_dim)
    mixed = (key, *_after(module.key_dim, key), *_after(2 * module.key_dim, value))
    per_head = {name: (values,) for name in ("in_proj_b", "in_proj_a", "a_proj", "b_proj", "dt_bias", "A_log")}
    return MixerCut(
        rows={
            # Rows of a key head follow one another in the joined projections.
            "in_proj_qkvz": (_times(heads, 2 * (module.key_dim + module.value_dim) // module.num_k_heads),),
            "in_proj_ba": (_times(heads, 2 * module.num_v_heads // module.num_k_heads),),
            "in_proj_qkv": mixed,
            "conv1d": mixed,
            **dict.fromkeys(("q_proj", "k_proj"), (key,)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,)),
            **per_head,
        },
        inputs={"out_proj": value, "o_proj": value},
        numbers={
            "num_k_heads": heads.size,
            "num_v_heads": values.size,
            "key_dim": key.size,
            "value_dim": value.size,
            "conv_dim": sum(span.size for span in mixed),
        },
    )


def _kimi_delta(module: Any, rank: int, world_size: int) -> MixerCut | None:
    """By heads."""
    if module.num_heads % world_size:
        return None
    heads, dim = _even(module.num_heads, rank, world_size), module.qkv_dim
    own = _times(heads, module.head_dim)
    gates = (f"forget_gate.{name}" for name in ("f_proj", "f_b_proj", "dt_bias"))
    sizes = {"num_heads": heads.size, "qkv_dim": own.size}
    return MixerCut(
        rows={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", *gates), (own,)),
            "conv1d": (own, *_after(dim, own), *_after(2 * dim, own)),
            **dict.fromkeys(("b_proj", "forget_gate.A_log"), (heads,)),
        },
        inputs={"o_proj": own},
        numbers={**sizes, "conv_dim": 3 * own.size, **{f"forget_gate.{name}": size for name, size in sizes.items()}},
    )


_KINDS: Mapping[str, Callable[[Any, int, int], MixerCut | None]] = {
    **dict.fromkeys(
        (
            "Mamba2Mixer",
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        _mamba2,
    ),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _mamba),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_convolution),
    **dict.fromkeys(
        (
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "OlmoHybridGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
        ),
        _delta_net,
    ),
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), _kimi_delta),
}
"""By class of the layer."""
