"""The reference of products with packed weights."""

import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.linear.grouped import GroupedBlocks
from phalanx_runtime.model.linear.packed.weight import PackedWeight


class DequantizedLinear:
    """`Linear` that dequantises its weight to the dtype of x in each call: the reference of kernels with packed weights."""

    __slots__ = ("bias", "num_bytes", "weight")

    def __init__(self, weight: PackedWeight | GroupedBlocks | GgmlWeight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))
