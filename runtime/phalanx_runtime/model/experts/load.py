"""Loads this rank's experts of a layer: from matrices of each expert, or as in transformers 5 from one tensor of all experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.config import ModelConfig
from phalanx_runtime.model.experts.sparse import Expert, ExpertList, Experts, Routing, SparseMlp
from phalanx_runtime.model.linear.linear import DenseLinear, Gate
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from phalanx_runtime.model.mixture import Mixture
from phalanx_runtime.model.partition import Shard, Span
from phalanx_runtime.model.weights import Checkpoint

JOINED_BLOCK = "mlp"
"""Module of router and experts in transformers 5."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """This rank's columns of one expert."""

    gate_up: Tensor
    """[2 * columns, hidden]: gate above up."""
    down: Tensor
    """[hidden, columns]."""


class ExpertReader:
    """Reads the layers of a model with experts."""

    def __init__(self, config: ModelConfig, mixture: Mixture, shard: Shard, checkpoint: Checkpoint) -> None:
        self._config = config
        self._mixture = mixture
        self._shard = shard
        self._checkpoint = checkpoint

    def read(self, layer: str, kernels: Kernels, gate: Gate) -> SparseMlp:
        """Returns router and experts. `layer`: name with a dot at its end; `gate`: as in `DecoderOps`. Raises ModelError."""
        mixture, tensors = self._mixture, self._mixture.tensors
        block = layer + tensors.block
        if not self._checkpoint.has(f"{block}.{tensors.router}.weight"):
            block = layer + JOINED_BLOCK
        shape = (mixture.num_experts, self._config.hidden_size)
        router = self._checkpoint.rows(f"{block}.{tensors.router}.weight", shape, Span(0, mixture.num_experts))
        return SparseMlp(DenseLinear(router, None), self._make(self._experts(f"{block}.experts"), kernels, gate))

    def _make(self, weights: Iterator[ExpertWeights], kernels: Kernels, gate: Gate) -> Experts:
        activation = self._config.activation
        experts = [
            Expert(make_gated(one.gate_up, None, activation, kernels, gate), make_linear(one.down, None, kernels))
            for one in weights
        ]
        return ExpertList(
            experts, self._shard.experts, Routing(per_token=self._mixture.per_token, is_normalized=self._mixture.is_normalized)
        )

    def _experts(self, name: str) -> Iterator[ExpertWeights]:
        read = self._joined_expert if self._checkpoint.has(f"{name}.gate_up_proj") else self._expert
        for number in range(self._shard.experts.start, self._shard.experts.stop):
            yield read(name, number)

    def _expert(self, name: str, number: int) -> ExpertWeights:
        tensors, columns = self._mixture.tensors, self._shard.expert_mlp
        inner, hidden = self._mixture.intermediate_size, self._config.hidden_size
        names = [f"{name}.{number}.{part}.weight" for part in (tensors.gate, tensors.up, tensors.down)]
        gate_up = [self._checkpoint.rows(part, (inner, hidden), columns) for part in names[:2]]
        return ExpertWeights(torch.cat(gate_up), self._checkpoint.columns(names[2], (hidden, inner), columns))

    def _joined_expert(self, name: str, number: int) -> ExpertWeights:
        one, whole, columns = Span(number, number + 1), Span(0, self._config.hidden_size), self._shard.expert_mlp
        num_experts, inner, hidden = self._mixture.num_experts, self._mixture.intermediate_size, self._config.hidden_size
        shape = (num_experts, 2 * inner, hidden)
        spans = [columns, Span(inner + columns.start, inner + columns.stop)]
        gate_up = [self._checkpoint.block(f"{name}.gate_up_proj", shape, (one, span, whole))[0] for span in spans]
        down = self._checkpoint.block(f"{name}.down_proj", (num_experts, hidden, inner), (one, whole, columns))
        return ExpertWeights(torch.cat(gate_up), down[0])
