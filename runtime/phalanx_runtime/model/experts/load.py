"""Loads this rank's experts of a layer: from matrices of each expert, or as in transformers 5 from one tensor of all experts."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.tables import TableScheme
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.experts.sparse import AdaptableExperts, Expert, ExpertList, ExpertWeights, Routing, SparseMlp, stack
from phalanx_runtime.model.linear.linear import DenseLinear, Gate
from phalanx_runtime.model.linear.registry import Kernels, Weight, make_gated, make_linear, pack_weight
from phalanx_runtime.model.mixture import Mixture
from phalanx_runtime.model.operators import launch_obstacle
from phalanx_runtime.model.partition import Shard, Span
from phalanx_runtime.model.stored.matrices import MatrixReader
from phalanx_runtime.model.stored.tables import TableReader
from phalanx_runtime.model.weights import Checkpoint

log = logging.getLogger(__name__)

JOINED_BLOCK = "mlp"
"""Module of router and experts in transformers 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExpert:
    """This rank's columns of one expert, quantised if the checkpoint is. Shapes as in `ExpertWeights`."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> ExpertWeights:
        """Returns the expert in the compute dtype."""
        gate_up, down = (one if isinstance(one, Tensor) else one.dequantize(dtype) for one in (self.gate_up, self.down))
        return ExpertWeights(gate_up=gate_up, down=down, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias)

    def pack(self, kernels: Kernels, dtype: torch.dtype) -> ExpertWeights | None:
        """Returns the expert in formats of the kernels on a GPU; None if one of its weights has none."""
        gate_up, down = (pack_weight(one, kernels.precision, dtype) for one in (self.gate_up, self.down))
        if gate_up is None or down is None:
            return None
        return ExpertWeights(gate_up=gate_up, down=down, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias)


class ExpertReader:
    """Reads the layers of a model with experts."""

    def __init__(
        self, config: ModelConfig, mixture: Mixture, shard: Shard, checkpoint: Checkpoint, *, has_bias: bool = True
    ) -> None:
        """`has_bias`: whether this rank adds the bias of a sum over ranks with columns of the same experts."""
        self._config = config
        self._mixture = mixture
        self._shard = shard
        self._checkpoint = checkpoint
        self._matrices = MatrixReader(checkpoint, config.quantization)
        self._has_down_bias = has_bias or mixture.is_parallel

    def read(self, layer: str, kernels: Kernels, gate: Gate) -> SparseMlp:
        """Returns router and experts. `layer`: name with a dot at its end; `gate`: as in `DecoderOps`. Raises ModelError."""
        mixture, tensors = self._mixture, self._mixture.tensors
        block = self._block(layer)
        shape = (mixture.num_experts, self._config.hidden_size)
        router = self._checkpoint.rows(f"{block}.{tensors.router}.weight", shape, Span(0, mixture.num_experts))
        name = f"{block}.{tensors.router}.bias"
        bias = self._checkpoint.vector(name, mixture.num_experts) if tensors.has_bias else None
        return SparseMlp(DenseLinear(router, bias), self._make(layer, kernels, gate))

    def read_stack(self, layer: str, kernels: Kernels) -> ExpertWeights:
        """Returns the experts as `GroupedExperts` has them; `read` does so on a GPU. Raises ModelError."""
        weights = self._experts(f"{self._block(layer)}.experts")
        return stack_experts(weights, self._shard.experts.size, kernels, self._checkpoint.dtype)

    def _block(self, layer: str) -> str:
        own = layer + self._mixture.tensors.block
        return own if self._checkpoint.has(f"{own}.{self._mixture.tensors.router}.weight") else layer + JOINED_BLOCK

    def _make(self, layer: str, kernels: Kernels, gate: Gate) -> AdaptableExperts:
        span, activation = self._shard.experts, self._config.activation
        routing = Routing(per_token=self._mixture.per_token, norm_topk_prob=self._mixture.norm_topk_prob)
        if span.size and self._checkpoint.device.type == "cuda" and launch_obstacle() is None:
            from phalanx_runtime.model.experts.gpu import GroupedExperts  # imports Triton

            return GroupedExperts(self.read_stack(layer, kernels), span, routing, activation)
        experts = []
        for one in self._experts(f"{self._block(layer)}.experts"):
            gate_up = make_gated(one.gate_up, one.gate_up_bias, activation, kernels, gate)
            experts.append(Expert(gate_up, make_linear(one.down, one.down_bias, kernels)))
        return ExpertList(experts, span, routing)

    def _experts(self, name: str) -> Iterator[StoredExpert]:
        read = self._expert
        if self._checkpoint.has(f"{name}.gate_up_proj_blocks"):
            read = self._packed_expert
        elif self._checkpoint.has(f"{name}.gate_up_proj"):
            read = self._interleaved_expert if self._mixture.tensors.is_interleaved else self._joined_expert
        for number in range(self._shard.experts.start, self._shard.experts.stop):
            yield read(name, number)

    def _expert(self, name: str, number: int) -> StoredExpert:
        tensors, columns = self._mixture.tensors, self._shard.expert_mlp
        inner, hidden = self._mixture.intermediate_size, self._config.hidden_size
        gate, up, down = (f"{name}.{number}.{part}" for part in (tensors.gate, tensors.up, tensors.down))
        gate_up = self._matrices.rows([(gate, inner, columns), (up, inner, columns)], hidden)
        weights = StoredExpert(gate_up=gate_up, down=self._matrices.columns(down, (hidden, inner), columns))
        if not tensors.has_bias:
            return weights
        gate_up_bias = torch.cat([self._checkpoint.vector(f"{part}.bias", inner, columns) for part in (gate, up)])
        down_bias = self._checkpoint.vector(f"{down}.bias", hidden) if self._has_down_bias else None
        return replace(weights, gate_up_bias=gate_up_bias, down_bias=down_bias)

    def _joined_expert(self, name: str, number: int) -> StoredExpert:
        one, whole, columns = Span(number, number + 1), Span(0, self._config.hidden_size), self._shard.expert_mlp
        num_experts, inner, hidden = self._mixture.num_experts, self._mixture.intermediate_size, self._config.hidden_size
        spans, block = [columns, Span(inner + columns.start, inner + columns.stop)], self._checkpoint.block
        if self._has_inputs_first(name):
            shape = (num_experts, hidden, 2 * inner)
            gate_up = [block(f"{name}.gate_up_proj", shape, (one, whole, span))[0].t() for span in spans]
            down = block(f"{name}.down_proj", (num_experts, inner, hidden), (one, columns, whole))[0].t()
        else:
            shape = (num_experts, 2 * inner, hidden)
            gate_up = [block(f"{name}.gate_up_proj", shape, (one, span, whole))[0] for span in spans]
            down = block(f"{name}.down_proj", (num_experts, hidden, inner), (one, whole, columns))[0]
        return StoredExpert(gate_up=torch.cat(gate_up), down=down.contiguous())

    def _has_inputs_first(self, name: str) -> bool:
        """Whether a tensor of all experts is [experts, in, out], as Qwen3-VL stores it."""
        inner, hidden = self._mixture.intermediate_size, self._config.hidden_size
        if inner != hidden:
            return self._checkpoint.shape(f"{name}.down_proj")[1:] == (inner, hidden)
        return self._checkpoint.shape(f"{name}.gate_up_proj")[1:] == (hidden, 2 * inner)

    def _interleaved_expert(self, name: str, number: int) -> StoredExpert:
        one, whole, columns = Span(number, number + 1), Span(0, self._config.hidden_size), self._shard.expert_mlp
        num_experts, inner, hidden = self._mixture.num_experts, self._mixture.intermediate_size, self._config.hidden_size
        both, block = Span(2 * columns.start, 2 * columns.stop), self._checkpoint.block
        gate_up = block(f"{name}.gate_up_proj", (num_experts, hidden, 2 * inner), (one, whole, both))[0].t()
        down = block(f"{name}.down_proj", (num_experts, inner, hidden), (one, columns, whole))[0].t()
        gate_up_bias, down_bias = self._interleaved_biases(name, number)
        return StoredExpert(gate_up=_separated(gate_up), down=down.contiguous(), gate_up_bias=gate_up_bias, down_bias=down_bias)

    def _interleaved_biases(self, name: str, number: int) -> tuple[Tensor, Tensor | None]:
        one, whole, columns = Span(number, number + 1), Span(0, self._config.hidden_size), self._shard.expert_mlp
        num_experts, inner, block = self._mixture.num_experts, self._mixture.intermediate_size, self._checkpoint.block
        both = Span(2 * columns.start, 2 * columns.stop)
        gate_up = block(f"{name}.gate_up_proj_bias", (num_experts, 2 * inner), (one, both))[0]
        shape = (num_experts, whole.size)
        return _separated(gate_up), block(f"{name}.down_proj_bias", shape, (one, whole))[0] if self._has_down_bias else None

    def _packed_expert(self, name: str, number: int) -> StoredExpert:
        """Reads MXFP4, [experts, out, in]."""
        scheme, columns = self._config.quantization, self._shard.expert_mlp
        if not isinstance(scheme, TableScheme):
            raise ModelError(f"tensor {name}.gate_up_proj_blocks needs quant_method mxfp4 in quantization_config")
        reader, experts = TableReader(self._checkpoint, scheme), self._mixture.num_experts
        inner, hidden = self._mixture.intermediate_size, self._config.hidden_size
        both, whole = Span(2 * columns.start, 2 * columns.stop), Span(0, hidden)
        gate_up = reader.read_expert(f"{name}.gate_up_proj", (experts, 2 * inner, hidden), number, rows=both, columns=whole)
        down = reader.read_expert(f"{name}.down_proj", (experts, hidden, inner), number, rows=whole, columns=columns)
        gate_up_bias, down_bias = self._interleaved_biases(name, number)
        return StoredExpert(gate_up=gate_up.by_outputs(_separated), down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)


def stack_experts(weights: Iterator[StoredExpert], count: int, kernels: Kernels, dtype: torch.dtype) -> ExpertWeights:
    """Returns the experts of a layer as `GroupedExperts` has them: packed if all have one layout, else in `dtype`."""
    whole: ExpertWeights | None = None
    for number, one in enumerate(weights):
        found = one.pack(kernels, dtype)
        if found is None or (whole is not None and found.layouts != whole.layouts):
            packed = () if whole is None else (whole.expert(i).dequantize(dtype) for i in range(number))
            if whole is not None:
                log.info("experts of several formats are dequantised", extra={"packed": str(whole.layouts), "number": number})
            elif not isinstance(one.down, Tensor):
                log.info("experts are dequantised: a rank cuts their blocks, or no kernel reads their format")
            return stack(chain(packed, (other.dequantize(dtype) for other in chain((one,), weights))), count)
        whole = whole or found.new_empty(count)
        whole.put(number, found)
    assert whole is not None, "a rank without experts has no stack"
    return whole


def _separated(both: Tensor) -> Tensor:
    """Returns gates above ups of alternating rows."""
    return torch.cat((both[::2], both[1::2]))
