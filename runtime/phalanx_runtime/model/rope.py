"""Rotary embedding: configuration and angles."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError, Unsupported
from phalanx_runtime.model.families import Family

Json = Mapping[str, object]


MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30
"""Fits fp32 with room for a product."""
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Parameters that a scaling does not change unless it has them."""


def integer(raw: Json, field: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
    """Reads a whole number from 1 to `most`. Raises ModelError."""
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"config.json: {field} must be a whole number from 1 to {most}, not {_shown(value)}")
    return value


def number(raw: Json, field: str, default: float | None = None) -> float:
    """Reads a number. Raises ModelError."""
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_NUMBER:
        raise ModelError(f"config.json: {field} must be a number up to {MAX_NUMBER:g}, not {_shown(value)}")
    return float(value)


def positive(raw: Json, field: str, default: float | None = None) -> float:
    """Reads a number above 0, not so small that its inverse is infinite. Raises ModelError."""
    value = number(raw, field, default)
    if value < 1 / MAX_NUMBER:
        raise ModelError(f"config.json: {field} must be above 0, not {value!r}")
    return value


def _shown(value: object) -> str:
    """Returns the start of a value that a message names; numbers of thousands of digits cannot be written."""
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 200 else f"{value!r:.80}"


def optional_number(raw: Json, field: str) -> float | None:
    """Reads a number, if there is one. Raises ModelError."""
    return None if raw.get(field) is None else number(raw, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary parameters of a layer."""

    theta: float
    kind: Literal["default", "linear", "llama3", "longrope", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    share: float = 1.0
    """Fraction of each head that rotates."""
    scale: float = 1.0
    """Factor on cosines and sines."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of frequencies up to `original_max_position`."""
    fast_rotations: float = 32.0
    """yarn: pairs with more rotations within `original_max_position` keep their frequency."""
    slow_rotations: float = 1.0
    """yarn: pairs with fewer rotations have their frequency divided by `factor`."""
    is_truncated: bool = True
    """yarn: both bounds are rounded to whole pairs."""
    axes: tuple[int, ...] = ()
    """By pair of dimensions: which of three positions rotates it, in time, height or width. Default: a token has one position."""


def read_ropes(raw: Json, family: Family, windows: Sequence[int | None]) -> tuple[Rope | None, ...]:
    """Returns the rotary embedding of each layer, if it has one. Raises ModelError."""
    parameters = _parameters(raw)
    if "full_attention" in parameters:
        full = _read_rope(raw, _object(parameters, "full_attention"), family.theta)
        local = _read_rope(raw, _object(parameters, "sliding_attention"), family.local_theta or family.theta)
    else:
        full = _read_rope(raw, parameters, positive(raw, "rope_theta", family.theta))
        full = local = replace(full, axes=_read_axes(parameters))
        if family.local_theta is not None:
            local = Rope(theta=positive(raw, "rope_local_base_freq", family.local_theta))
    ropes = tuple(full if window is None else local for window in windows)
    if family.nope_interval is None:
        return ropes
    rotates = _rotating_layers(raw, family.nope_interval, len(ropes))
    return tuple(rope if is_rotating else None for rope, is_rotating in zip(ropes, rotates, strict=True))


def _parameters(raw: Json) -> Json:
    """Returns `rope_parameters`, by kind of layer if they are so, as the older `rope_scaling` changes them.

    Instructions for a longer context add that one, also to a file that has both parameters and their base.
    """
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise ModelError(f"rope_parameters must be a JSON object, not {_shown(scaling or parameters)}")
    if not scaling or "full_attention" in scaling:
        return scaling or parameters
    if "full_attention" in parameters:
        return {**parameters, "full_attention": _scaled(_object(parameters, "full_attention"), scaling)}
    return _scaled(parameters, scaling)


def _scaled(parameters: Json, scaling: Json) -> Json:
    return {**{name: parameters[name] for name in _KEPT if name in parameters}, **scaling}


def _read_axes(parameters: Json) -> tuple[int, ...]:
    """Returns the axis of each pair of dimensions: in sections, or in turn, where the longer ones are in time at the end."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return ()
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(n, int) and 0 <= n <= 512 for n in sections):
        raise ModelError(f"config.json: mrope_section must be three numbers of pairs, not {_shown(sections)}")
    if not parameters.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))


def _rotating_layers(raw: Json, interval: int, layers: int) -> list[bool]:
    listed = raw.get("no_rope_layers")
    if not isinstance(listed, list):
        every = integer(raw, "no_rope_layer_interval", interval)
        return [bool((layer + 1) % every) for layer in range(layers)]
    if len(listed) < layers:
        raise ModelError(f"no_rope_layers has {len(listed)} entries for {layers} layers")
    return [bool(rotates) for rotates in listed[:layers]]


def _object(raw: Json, field: str) -> Json:
    value = raw.get(field)
    if not isinstance(value, dict):
        raise ModelError(f"rope_parameters.{field} must be a JSON object, not {_shown(value)}")
    return value


def _read_rope(raw: Json, parameters: Json, theta: float) -> Rope:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    theta = positive(parameters, "rope_theta", theta)
    share = number(parameters, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise ModelError(f"config.json: partial_rotary_factor must be above 0 and at most 1, not {share!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default" | "mrope":
            return Rope(theta=theta, share=share)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=positive(parameters, "factor"), share=share)
        case "llama3":
            if number(parameters, "high_freq_factor") <= number(parameters, "low_freq_factor"):
                raise ModelError("config.json: high_freq_factor must be greater than low_freq_factor")
            return Rope(
                theta=theta,
                kind="llama3",
                factor=positive(parameters, "factor"),
                low_freq_factor=positive(parameters, "low_freq_factor"),
                high_freq_factor=positive(parameters, "high_freq_factor"),
                original_max_position=_original_max_position(raw, parameters, integer(raw, "max_position_embeddings", 2048)),
                share=share,
            )
        case "longrope" | "su":
            return _read_longrope(raw, parameters, theta, share)
        case "yarn":
            return _read_yarn(raw, parameters, theta, share)
        case _:
            raise Unsupported(f"rope type {_shown(kind)} is not supported: use default, linear, llama3, longrope or yarn")


def _read_longrope(raw: Json, parameters: Json, theta: float, share: float) -> Rope:
    factors = parameters.get("short_factor")
    if not isinstance(factors, list) or not all(
        isinstance(x, int | float) and 1 / MAX_NUMBER <= x <= MAX_NUMBER for x in factors
    ):
        raise ModelError(f"longrope: short_factor must be a list of positive numbers, not {_shown(factors)}")
    longest = integer(raw, "max_position_embeddings")
    original = _original_max_position(raw, parameters, longest)
    stretch = positive(parameters, "factor", longest / original)
    if original < 2:
        raise ModelError("config.json: original_max_position_embeddings of longrope must be at least 2")
    scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    scale = number(parameters, "attention_factor", scale)
    return Rope(
        theta=theta,
        kind="longrope",
        original_max_position=original,
        share=share,
        scale=scale,
        short_factors=tuple(map(float, factors)),
    )


def _original_max_position(raw: Json, parameters: Json, default: int) -> int:
    """Prefers the field next to the parameters to that among them, as `transformers` does."""
    field = "original_max_position_embeddings"
    return integer(raw, field, integer(parameters, field, default))


def _read_yarn(raw: Json, parameters: Json, theta: float, share: float) -> Rope:
    factor = positive(parameters, "factor")
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta of yarn must be above 1, not {theta!r}")
    scales = [number(parameters, field, 0.0) for field in ("mscale", "mscale_all_dim")]
    if min(scales) < 0:
        raise ModelError(f"config.json: mscale and mscale_all_dim of yarn must not be negative, not {scales!r}")
    if all(scales):
        scale = _yarn_scale(factor, scales[0]) / _yarn_scale(factor, scales[1])
    else:
        scale = _yarn_scale(factor, 1.0)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=_original_max_position(raw, parameters, integer(raw, "max_position_embeddings", 2048)),
        share=share,
        scale=number(parameters, "attention_factor", scale),
        fast_rotations=positive(parameters, "beta_fast", 32.0),
        slow_rotations=positive(parameters, "beta_slow", 1.0),
        is_truncated=bool(parameters.get("truncate", True)),
    )


def _yarn_scale(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair of dimensions, fp32 [pairs]. Raises ModelError.

    Sources: RoFormer; Llama 3.1; YaRN (Peng et al. 2023).
    """
    size = int(head_dim * rope.share)
    inverse: Tensor = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    match rope.kind:
        case "default":
            return inverse
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, inverse)
        case "yarn":
            return _yarn_frequencies(rope, inverse)
        case "longrope":
            if len(rope.short_factors) != len(inverse):
                raise ModelError(f"longrope has {len(rope.short_factors)} factors for {len(inverse)} pairs of dimensions")
            return inverse / torch.tensor(rope.short_factors)


def _llama3_frequencies(rope: Rope, inverse: Tensor) -> Tensor:
    """Divides low frequencies by `factor`, blends middle ones."""
    wave = 2 * math.pi / inverse
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    slowed = torch.where(wave > low, inverse / rope.factor, inverse)
    return torch.where((wave >= high) & (wave <= low), between, slowed)


def _yarn_frequencies(rope: Rope, inverse: Tensor) -> Tensor:
    """Divides frequencies by `factor`, less and less from the slow bound to the fast one, linearly in the number of the pair."""
    pairs = len(inverse)

    def pair_with(rotations: float) -> float:
        return pairs * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_with(rope.fast_rotations), pair_with(rope.slow_rotations)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed = ((torch.arange(pairs) - first) / max(last - first, 0.001)).clamp(0, 1)
    return inverse / rope.factor * slowed + inverse * (1 - slowed)


class RopeTable:
    """Cosines and signed sines of all positions."""

    __slots__ = ("_axes", "_dims", "cos", "sin")

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(rope, head_dim))
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        # [positions, 1, dims], to broadcast over heads. The first half of sin is negated.
        self.cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)
        if rope.axes and len(rope.axes) != cos.shape[-1]:
            raise ModelError(f"mrope_section has {len(rope.axes)} pairs of dimensions; a head has {cos.shape[-1]}")
        self._axes = torch.tensor(rope.axes * 2, device=device) if rope.axes else None
        self._dims = torch.arange(len(rope.axes) * 2, device=device)

    def at(self, positions: Tensor, cells: Tensor | None = None) -> "Angles":
        """Returns two [tokens, 1, dims]. `cells`: see `StepBatch`."""
        if cells is None or self._axes is None:
            return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        of_dims = cells.index_select(0, self._axes).T.contiguous()  # as the result is then, which kernels read
        return self.cos[of_dims, 0, self._dims].unsqueeze(1), self.sin[of_dims, 0, self._dims].unsqueeze(1)


Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines."""


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotates x, [tokens, heads, head_dim]; dimensions beyond the angles are unchanged."""
    cos, sin = angles
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], angles), x[..., size:]), -1)
    half = size // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)
