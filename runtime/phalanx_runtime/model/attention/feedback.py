"""Rounding with feedback: one dimension of a key or value after the other, where later ones correct the error so far.

What attention makes of the error e of a key is a product with queries, of a value one with the output's weights: its mean square
is e^T M e for a matrix M of the KV head. Rounding the dimensions in turn, each to the number nearest to its value less the
corrections, finds codes with a small error of this kind (Babai 1986; for weights GPTQ, Frantar et al. 2023). Codes are computed
for several scales, and the ones with the smallest error are kept: the scale of the whole range is seldom the best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from phalanx_runtime.model.attention.page_format import PageFormat, divisor, hadamard_transform

MARGINS: Mapping[str, tuple[float, ...]] = {"fp8": (0.0,), "int8": (0.0,), "int4": (0.0, 0.04, 0.08)}
"""By format: margins of the scales that are tried (`PageFormat.scales_of`), multiples of the second one."""
DAMPING = 0.01
"""Share of the mean of M's diagonal that is added to it."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What rounds keys or values of one layer, for its KV heads, in dimensions of the Hadamard transform."""

    shift: Tensor
    """[kv_heads, head_dim], float32: subtracted before. In keys it changes all logits of a query by the same number; attention
    adds that of values to its result."""
    order: Tensor
    """[kv_heads, head_dim], int64: dimensions in the order in which they are rounded."""
    triangle: Tensor
    """[kv_heads, head_dim, head_dim], float32: row i has, after its diagonal, what each later dimension corrects for the error
    of the i-th one."""
    weights: Tensor
    """[kv_heads, head_dim], float32: of the squared error of the i-th dimension."""


@dataclass(frozen=True, slots=True)
class KvRounding:
    """How the keys and values of one layer are rounded, by the calibration of a model."""

    keys: Feedback
    values: Feedback

    def to(self, device: torch.device) -> "KvRounding":
        """Returns the same rounding on a device."""
        parts = ([getattr(part, field.name).to(device) for field in fields(part)] for part in (self.keys, self.values))
        return KvRounding(*(Feedback(*tensors) for tensors in parts))


def make_feedback(shift: Tensor, moments: Tensor) -> Feedback:
    """Returns the rounding for numbers less `shift`, [kv_heads, head_dim], that the error M = `moments` fits.

    moments: [kv_heads, head_dim, head_dim], of heads before the Hadamard transform, as `shift`.
    """
    wide = hadamard_transform(hadamard_transform(moments.double()).transpose(1, 2))
    wide = wide + (DAMPING * wide.diagonal(dim1=1, dim2=2).mean(1) + 1e-30)[:, None, None] * torch.eye(wide.shape[1]).to(wide)
    order = _order(wide)
    rows = torch.arange(len(wide), device=wide.device)[:, None, None]
    ordered = wide[rows, order[:, :, None], order[:, None, :]]
    factors = torch.linalg.cholesky(torch.linalg.inv(ordered)).transpose(1, 2)
    powers = factors.diagonal(dim1=1, dim2=2)
    return Feedback(
        shift=hadamard_transform(shift.float()),
        order=order.contiguous(),
        triangle=(factors / powers.unsqueeze(-1)).triu(1).float().contiguous(),
        weights=powers.pow(-2).float().contiguous(),
    )


def _order(moments: Tensor) -> Tensor:
    """Returns, [kv_heads, head_dim], dimensions in an order in which errors weigh evenly: the least important ones come last.

    An error that later dimensions cannot correct counts in full, so the last place gets the dimension with the smallest moment,
    and each place before it the one that has the smallest, given those after it: a Cholesky factorisation with pivots.
    """
    left, places = moments.clone(), list[Tensor]()
    heads = torch.arange(len(left), device=left.device)
    is_placed = torch.zeros(left.shape[:2], dtype=torch.bool, device=left.device)
    for _ in range(left.shape[1]):
        place = left.diagonal(dim1=1, dim2=2).masked_fill(is_placed, float("inf")).argmin(1)
        places.append(place)
        is_placed[heads, place] = True
        column = left[heads, place] / left[heads, place, place].sqrt().unsqueeze(1)
        left = left - column.unsqueeze(2) * column.unsqueeze(1)
    return torch.stack(places[::-1], 1)


def encode_with_feedback(format: PageFormat, x: Tensor, feedback: Feedback) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of [tokens, kv_heads, head_dim] less the shift, with the smallest error of all margins."""
    wide = x.float() - feedback.shift
    best_codes, best_scales, best = _rounded_in_turn(format, wide, MARGINS[format.name][0], feedback)
    for margin in MARGINS[format.name][1:]:
        codes, scales, error = _rounded_in_turn(format, wide, margin, feedback)
        is_better = (error < best).unsqueeze(-1)
        best_codes, best_scales = torch.where(is_better, codes, best_codes), torch.where(is_better, scales, best_scales)
        best = torch.where(is_better.squeeze(-1), error, best)
    return best_codes, best_scales


def _rounded_in_turn(format: PageFormat, x: Tensor, margin: float, feedback: Feedback) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scales and weighted errors, [tokens, kv_heads]."""
    scales = format.scales_of(x, margin)
    order = feedback.order.expand_as(x)
    steps, offsets = (part.expand_as(x).gather(-1, order) for part in format.spread(scales, x.shape[-1]))
    left, divisors = x.gather(-1, order), divisor(steps)
    numbers, total = torch.empty_like(x), torch.zeros(x.shape[:-1], device=x.device)
    for i in range(x.shape[-1]):
        numbers[..., i] = format.numbers((left[..., i] - offsets[..., i]) / divisors[..., i])
        error = left[..., i] - (numbers[..., i] * steps[..., i] + offsets[..., i])
        left[..., i + 1 :] -= error.unsqueeze(-1) * feedback.triangle[:, i, i + 1 :]
        total = total + error * error * feedback.weights[:, i]
    return format.pack(torch.empty_like(x).scatter_(-1, order, numbers)), scales, total


def shifted_back(out: Tensor, shift: Tensor) -> Tensor:
    """Returns attention's result, [tokens, heads, head_dim], plus what values were shifted by, [kv_heads, head_dim]."""
    return out + shift.repeat_interleave(out.shape[1] // len(shift), 0).to(out.dtype)
