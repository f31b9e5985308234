"""What the tensors of an adapter change, by their names in PEFT's format, and PEFT's matrices of all experts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx_runtime.checkpoint.adapter import EXPERT_LINEARS, EXPERT_PARAMETERS, LINEARS

ALL_EXPERTS = "experts"
"""Module of a parameter with a matrix of each expert; the shapes of its factors say which."""
_FACTOR = re.compile(
    r"(?P<stem>base_model\.model\.model\.layers\.(?P<layer>[0-9]{1,6})\.(?P<module>[\w.]+))\.lora_(?P<factor>[AB])\.weight"
)
_LINEAR = re.compile(rf"self_attn\.({'|'.join(LINEARS[:4])}|qkv_proj)|mlp\.({'|'.join(LINEARS[4:])}|gate_up_proj)")
_EXPERT = re.compile(rf"(?:mlp|block_sparse_moe)\.experts\.([0-9]{{1,6}})\.({'|'.join(EXPERT_LINEARS)})")
_PARAMETER = re.compile(r"(?:mlp|block_sparse_moe)\.experts(?:\.base_layer)?")


@dataclass(frozen=True, slots=True)
class Target:
    """What two factors change."""

    stem: str
    """Start of their names."""
    layer: int
    module: str
    """A linear, or several that are stored as one; with a number and a dot before it that of one expert; or `ALL_EXPERTS`."""

    def name(self, factor: str) -> str:
        """Returns the name of factor A or B."""
        return f"{self.stem}.lora_{factor}.weight"


def read_target(name: str) -> tuple[Target, str] | None:
    """Returns what a tensor belongs to and its factor, A or B; none if that is not supported."""
    match = _FACTOR.fullmatch(name)
    module = None if match is None else _module(match["module"])
    return None if match is None or module is None else (Target(match["stem"], int(match["layer"]), module), match["factor"])


def _module(path: str) -> str | None:
    if linear := _LINEAR.fullmatch(path):
        return linear[1] or linear[2]
    if expert := _EXPERT.fullmatch(path):
        return f"{int(expert[1])}.{EXPERT_LINEARS[expert[2]]}"
    return ALL_EXPERTS if _PARAMETER.fullmatch(path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFactors:
    """How factors of all experts are stored.

    A: [experts * rank, in], B: [out, rank * experts] with the expert as last index. PEFT before 0.19 takes the parameter,
    [experts, out, in], for one of [experts, in, out], so A has the outputs and B the inputs.
    """

    linear: str
    is_swapped: bool

    def of_expert(self, a: Tensor, b: Tensor, number: int, num_experts: int) -> tuple[Tensor, Tensor]:
        """Returns the factors of one expert, [rank, in] and [out, rank]."""
        rows = a.view(num_experts, -1, a.shape[1])[number]
        columns = b.view(len(b), -1, num_experts)[:, :, number]
        return (columns.t(), rows.t()) if self.is_swapped else (rows, columns)


def joined_factors(a: int, b: int, hidden: int, inner: int) -> Sequence[JoinedFactors]:
    """Returns the layouts that columns of A and rows of B fit: none, one, or two if inputs and outputs are equally many."""
    sizes = zip(EXPERT_PARAMETERS, ((hidden, 2 * inner), (inner, hidden)), strict=True)
    return [
        JoinedFactors(linear=linear, is_swapped=is_swapped)
        for linear, (inputs, outputs) in sizes
        for is_swapped in (False, True)
        if (a, b) == ((outputs, inputs) if is_swapped else (inputs, outputs))
    ]
