"""Linears and experts of a `transformers` model whose weights a checkpoint stores quantised.

The linears of the fused decoder compute them, from codes where those stay packed. The module of a linear keeps its hooks and its
bias. Experts are matrices of a stack that the code of the model multiplies by `torch.nn.functional.linear`, one after the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx_runtime.checkpoint.quantization import Scheme
from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.generic.latent import is_absorbed
from phalanx_runtime.model.generic.split import Cut, intersect_spans
from phalanx_runtime.model.linear.linear import Linear
from phalanx_runtime.model.linear.registry import Kernels, Weight, make_linear
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.weights import Checkpoint

_SUFFIX = ".weight"
_CODES = (".weight_packed", ".qweight")
"""Ends of the names of codes, where `transformers` has `_SUFFIX`."""
_EQUAL_FORWARDS = ("FalconLinear",)
"""Kinds of linears with a forward pass of their own that is that of `nn.Linear`."""


def weight_names(checkpoint: Checkpoint) -> list[str]:
    """Returns all tensor names, and those that linears in codes would have without quantisation."""
    names = checkpoint.names()
    return names + [name.removesuffix(end) + _SUFFIX for name in names for end in _CODES if name.endswith(end)]


class StoredMatrix:
    """One matrix of a stack; only `torch.nn.functional.linear` accepts it."""

    __slots__ = ("inputs", "linear")

    def __init__(self, linear: Linear, inputs: int) -> None:
        self.linear = linear
        self.inputs = inputs

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Multiplies. Raises Unsupported."""
        if func is not F.linear or kwargs or len(args) != 2:
            raise Unsupported(f"its experts are quantised, and multiplied by {getattr(func, '__name__', func)}")
        x, matrix = args
        _check_inputs(x, matrix.inputs, "an expert")
        product: Tensor = matrix.linear(x)
        return product


class StoredWeights:
    """Reads the quantised weights of a model into its modules."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, kernels: Kernels) -> None:
        self._matrices = MatrixReader(checkpoint, scheme)
        self._dtype, self._device, self._name = checkpoint.dtype, checkpoint.device, scheme.name
        self._kernels = kernels
        self.num_bytes = 0
        """Of the linears read."""

    def has(self, sources: Sequence[str]) -> bool:
        """Whether any of these weights is quantised."""
        return any(self._matrices.is_stored(source.removesuffix(_SUFFIX)) for source in sources)

    def linear(self, model: nn.Module, name: str, source: str, shape: Sequence[int], cut: Cut | None) -> Tensor:
        """Reads this rank's part of a weight into its module. Returns what its parameter becomes. Raises ModelError.

        That is empty, or for a weight that attention absorbs the dequantised part.
        """
        module = model.get_submodule(name.removesuffix(_SUFFIX))
        if not _is_linear(module) or len(shape) != 2:
            raise Unsupported(f"{self._name}: {name} is quantised, and no linear")
        weight = self._part([source], shape, cut)
        if is_absorbed(model, name.removesuffix(_SUFFIX)):
            return weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype)
        linear, inputs = self._made(weight), _num_inputs(shape, cut)

        def forward(x: Tensor) -> Tensor:
            _check_inputs(x, inputs, name)
            y = linear(x.reshape(-1, x.shape[-1]))
            y = y if module.bias is None else y.add_(module.bias)
            return y.view(*x.shape[:-1], y.shape[-1])

        module.forward = forward  # type: ignore[assignment, method-assign]
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def stack(self, model: nn.Module, name: str, kinds: Sequence[Sequence[str]], shape: Sequence[int], cut: Cut | None) -> None:
        """Reads this rank's part of the experts of a parameter into its module. kinds: by kind and expert. Raises ModelError."""
        if len(shape) != 3 or any(len(kind) != shape[0] for kind in kinds) or (cut is not None and cut.dim % 3 == 0):
            raise Unsupported(f"{self._name}: the quantised experts of {name} are no stack of matrices")
        own = None if cut is None else Cut(cut.dim % 3 - 1, cut.spans)
        inputs = _num_inputs(shape[1:], own)
        experts = [StoredMatrix(self._made(self._part(sources, shape[1:], own)), inputs) for sources in zip(*kinds, strict=True)]
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        del module._parameters[leaf]
        setattr(module, leaf, experts)

    def refuse(self, name: str) -> None:
        """Raises Unsupported for a parameter that the model makes of several weights."""
        raise Unsupported(f"{self._name}: {name} is made of several quantised weights")

    def _made(self, weight: Weight) -> Linear:
        linear = make_linear(weight, None, self._kernels)
        self.num_bytes += linear.num_bytes
        return linear

    def _part(self, sources: Sequence[str], shape: Sequence[int], cut: Cut | None) -> Weight:
        """Reads weights of equal height, one above the other. shape: of all of them; cut: this rank's part of it."""
        linears = [source.removesuffix(_SUFFIX) for source in sources]
        if cut is not None and cut.dim % 2 == 1:
            if len(linears) > 1 or len(cut.spans) > 1:
                raise Unsupported(f"tensor parallel, {self._name}: {linears[0]} is cut in several parts")
            return self._matrices.columns(linears[0], (shape[0], shape[1]), cut.spans[0])
        height = shape[0] // len(linears)
        spans = (Span(0, shape[0]),) if cut is None else cut.spans
        parts = [
            (linear, height, span)
            for index, linear in enumerate(linears)
            for span, _ in intersect_spans(spans, index * height, (index + 1) * height)
        ]
        return self._matrices.rows(parts, shape[1])


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module multiplies with its weight and adds its bias, and does nothing else."""
    has_own = type(module).forward is not nn.Linear.forward and type(module).__name__ not in _EQUAL_FORWARDS
    return isinstance(module, nn.Linear) and not has_own


def _num_inputs(shape: Sequence[int], cut: Cut | None) -> int:
    """Returns the inputs of this rank's part of a matrix."""
    return sum(span.size for span in cut.spans) if cut is not None and cut.dim % 2 == 1 else shape[1]


def _check_inputs(x: Tensor, inputs: int, name: str) -> None:
    """Raises Unsupported for another number of inputs: kernels, unlike torch, do not check it."""
    if x.shape[-1] != inputs:
        raise Unsupported(f"{name} has {inputs} quantised inputs, and is multiplied with {x.shape[-1]}")
