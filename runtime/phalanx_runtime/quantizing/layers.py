"""Finds the linears of a model's layers, and rounds them layer by layer, on the outputs of the rounded layers before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.decoder.decoder import Decoder, Layer
from phalanx_runtime.model.experts.sparse import ExpertList, SparseMlp
from phalanx_runtime.model.linear.linear import DenseLinear, Gated, Linear, PlainGated
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.quantizing.rounding import Grid, Rounded, round_weight
from phalanx_runtime.quantizing.texts import SequencePages

HEAD = "lm_head"
"""Name of the output head."""
Names = list[tuple[str, int]]
"""Names of stored linears with their outputs, one above the other."""


class RecordedLinear(DenseLinear):
    """`DenseLinear` that adds up the squares of its inputs, until it is rounded."""

    __slots__ = ("squares",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        inputs = weight.shape[1]
        self.squares: Tensor | None = torch.zeros((inputs, inputs), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.squares is not None:
            wide = x.float()
            self.squares.addmm_(wide.t(), wide)
        return super().__call__(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))

    def round(self, grid: Grid, dtype: torch.dtype) -> Rounded:
        """Replaces the weight by the rounded one, which it returns."""
        assert self.squares is not None
        rounded = round_weight(self.weight, self.squares, grid, dtype)
        self.weight, self.squares = rounded.dequantize().to(self.weight.dtype), None
        return rounded


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """Rows of one linear as the checkpoint names them."""

    name: str
    rounded: Rounded


def linear_names(config: ModelConfig) -> list[list[Names]]:
    """Returns the names in each layer, in the order of `recorded`."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attention, mlp, inner = layer + "self_attn.", layer + "mlp.", config.intermediate_size
        qkv = [(attention + name, size) for name, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))]
        names: list[Names] = [[(attention + "qkv_proj", heads + 2 * kv_heads)] if config.joined else qkv]
        names.append([(attention + "o_proj", config.hidden_size)])
        if config.mixture is not None and config.mixture.layers[index]:
            tensors, inner = config.mixture.tensors, config.mixture.intermediate_size
            for number in range(config.mixture.num_experts):
                expert = f"{layer}{tensors.block}.experts.{number}."
                names.append([(expert + tensors.gate, inner), (expert + tensors.up, inner)])
                names.append([(expert + tensors.down, config.hidden_size)])
        else:
            gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]
            names.append([(mlp + "gate_up_proj", 2 * inner)] if config.joined else gate_up)
            names.append([(mlp + "down_proj", config.hidden_size)])
        found.append(names)
    return found


def recorded(layer: Layer) -> tuple[Layer, list[RecordedLinear]]:
    """Returns the layer with linears that record their inputs, and those: of attention, then of the MLP or of each expert."""
    qkv, o = _record(layer.qkv), _record(layer.o)
    if layer.gate_up is not None:
        gate_up, down = _record_gated(layer.gate_up), _record(layer.down)
        return replace(layer, qkv=qkv, o=o, down=down), [qkv, o, gate_up, down]
    assert isinstance(layer.down, SparseMlp) and isinstance(layer.down.experts, ExpertList)
    experts = layer.down.experts
    parts = [(_record_gated(expert.gate_up), _record(expert.down)) for expert in experts.experts]
    experts.experts = [replace(expert, down=down) for expert, (_, down) in zip(experts.experts, parts, strict=True)]
    return replace(layer, qkv=qkv, o=o), [qkv, o, *(linear for pair in parts for linear in pair)]


def _record(linear: Linear) -> RecordedLinear:
    assert isinstance(linear, DenseLinear)
    return RecordedLinear(linear.weight, linear.bias)


def _record_gated(gated: Gated) -> RecordedLinear:
    assert isinstance(gated, PlainGated)
    linear = _record(gated.linear)
    gated.linear = linear
    return linear


def round_layers(
    model: Decoder, form: LoadOptions, sequences: Sequence[list[int]], grid: Grid, dtype: torch.dtype, *, has_head: bool = False
) -> Iterator[list[StoredLinear]]:
    """Rounds the model's linears in place, with scales in `dtype`, `has_head` also the output head.

    Yields those of each layer, then the head. Raises ModelError.
    """
    model.row_linears = model.step_layers = None  # they compute a text without the linears that record it
    pages = SequencePages(model, form, sequences)
    states = [model.embed(batch) for batch in pages.batches()]
    for index, names in enumerate(linear_names(model.config)):
        model.layers[index], linears = recorded(model.layers[index])
        for batch, x in zip(pages.batches(), states, strict=True):
            model.run_layers(x.clone(), batch, [model.layers[index]], [pages.caches[index]], index)
        found = [part for linear, own in zip(linears, names, strict=True) for part in _rounded(linear, own, grid, dtype)]
        for batch, x in zip(pages.batches(), states, strict=True):
            model.run_layers(x, batch, [model.layers[index]], [pages.caches[index]], index)
        yield found
    if has_head:
        model.head = head = _record(model.head)
        for x in states:
            model.state_logits(x)
        yield _rounded(head, [(HEAD, len(head.weight))], grid, dtype)


def _rounded(linear: RecordedLinear, names: Names, grid: Grid, dtype: torch.dtype) -> list[StoredLinear]:
    try:
        rounded = linear.round(grid, dtype)
    except ModelError as error:
        raise ModelError(f"{names[0][0]} cannot be rounded: {error}") from error
    sizes = [size for _, size in names]
    parts = zip(names, torch.split(rounded.codes, sizes), torch.split(rounded.scales, sizes), strict=True)
    return [StoredLinear(name, Rounded(codes, scales)) for (name, _), codes, scales in parts]


def choose_group(widths: Sequence[int]) -> int:
    """Returns the largest group of inputs that cuts all linears into whole ones. Raises ModelError."""
    for group in (128, 64, 32):
        if all(width % group == 0 for width in widths):
            return group
    odd = next(width for width in widths if width % 32)
    raise ModelError(f"4 bits: a linear has {odd} inputs, no multiple of 32: use w8a16 or w8a8")
