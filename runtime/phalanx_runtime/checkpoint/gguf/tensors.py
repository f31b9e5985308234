"""The tensors of a checkpoint that a GGUF file has, by their names in model folders.

Rows (head, i, half) of interleaved queries and keys become rows (head, half, i); joined experts become a tensor each; norms of
Gemma are stored with 1 added. Bytes of rows stay as they are.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from phalanx_runtime.checkpoint.gguf.families import INTERLEAVED, ROOTS, GgufFamily, family_of
from phalanx_runtime.checkpoint.gguf.file import GgufFile, GgufTensor
from phalanx_runtime.errors import ModelError

ROPE_DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_DIVISORS, LONG_DIVISORS, SHORT_DIVISORS)
"""Become fields of config.json."""
WHOLE = slice(None)
_DIMENSIONS = {"weight": 3, "bias": 2}
"""Of tensors that join all experts of a layer."""
_JOINED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Tensors of a layer that `transformers` has for all experts."""
_EXPERT = re.compile(r"(.+)[.]\d+[.](gate|up|down)_proj[.](weight|bias)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint."""

    name: str
    tensor: GgufTensor
    num_heads: int | None = None
    """Of interleaved rows."""
    has_norm_offset: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return self.tensor.shape

    @property
    def kind(self) -> GGMLQuantizationType:
        """The format of its rows."""
        return self.tensor.quantization

    @property
    def num_weights(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return int(self.tensor.raw.nbytes)

    def check_kind(self) -> None:
        """Raises ModelError if its numbers cannot be read."""
        size, num_bytes = GGML_QUANT_SIZES[self.kind]
        GgufTensor(self.tensor.name, (size,), self.kind, np.zeros(num_bytes, np.uint8)).float32()

    def raw(self, rows: slice = WHOLE, columns: slice = WHOLE) -> npt.NDArray[np.uint8]:
        """Returns bytes of rows; `columns`: those of each row."""
        return self.tensor.raw[self._in_file(rows), columns]

    def float32(self, rows: slice = WHOLE) -> npt.NDArray[np.float32]:
        """Returns numbers of rows, or of a vector. Raises ModelError for an unsupported format."""
        if len(self.shape) == 1:
            values = self.tensor.float32()[self._in_file(rows)]
            return values - np.float32(1) if self.has_norm_offset else values
        raw = self.raw(rows)
        return GgufTensor(self.tensor.name, (len(raw), *self.shape[1:]), self.kind, raw).float32()

    def _in_file(self, rows: slice) -> slice | npt.NDArray[np.intp]:
        """Returns where the file has the rows, or numbers of a bias."""
        if self.num_heads is None:
            return rows
        return np.arange(self.shape[0]).reshape(self.num_heads, -1, 2).swapaxes(1, 2).reshape(-1)[rows]


@dataclass(frozen=True, slots=True)
class JoinedExperts:
    """One tensor of all experts, as `transformers` has it: inputs first; outputs of gate and up alternate."""

    name: str
    kinds: tuple[tuple[StoredTensor, ...], ...]
    """Gate and up, or down alone; for each its experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, inputs, outputs] of matrices, [experts, outputs] of biases."""
        outputs, *inputs = self.kinds[0][0].shape
        return (len(self.kinds[0]), *inputs, len(self.kinds) * outputs)

    @property
    def num_weights(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    def float32(self) -> npt.NDArray[np.float32]:
        """Returns the numbers. Raises ModelError for an unsupported format."""
        whole = np.empty(self.shape, np.float32)
        for number, parts in enumerate(zip(*self.kinds, strict=True)):
            for kind, part in enumerate(parts):
                whole[number, ..., kind :: len(parts)] = part.float32().T
        return whole


def written_tensors(file: GgufFile, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor | JoinedExperts]:
    """Returns the tensors of a model folder, from those of the file. Raises ModelError for an expert that lacks a part."""
    if not family_of(file).joins_experts:
        return tensors
    others, experts = list[StoredTensor | JoinedExperts](), dict[str, dict[str, list[StoredTensor]]]()
    for one in tensors:
        if (match := _EXPERT.fullmatch(one.name)) is None:
            others.append(one)
            continue
        block, kind, suffix = match.groups()
        name = f"{block}.{'down' if kind == 'down' else 'gate_up'}_proj{'_bias' if suffix == 'bias' else ''}"
        experts.setdefault(name, {}).setdefault(kind, []).append(one)
    for block in {name.partition(".experts")[0]: None for name in experts}:
        if missing := [part for part in _JOINED if f"{block}.experts.{part}" not in experts]:
            raise ModelError(f"{file.path} has no tensors of {block}.experts.{missing[0]}")
    for name, by_kind in experts.items():
        kinds = tuple(tuple(by_kind.get(kind, ())) for kind in (("gate", "up") if "gate_up_proj" in name else ("down",)))
        if len({one.shape for kind in kinds for one in kind}) != 1 or len({len(kind) for kind in kinds}) != 1:
            raise ModelError(f"{file.path}: the tensors of {name} do not fit together")
        others.append(JoinedExperts(name, kinds))
    return others


def stored_tensors(file: GgufFile) -> list[StoredTensor]:
    """Returns the tensors of the checkpoint in file order. Raises ModelError for a tensor that no model has."""
    family, found = family_of(file), list[StoredTensor]()
    for tensor in file.tensors:
        if tensor.name not in ROPE_TENSORS:
            found += [_stored(file, family, name, part) for name, part in _renamed(file, family, tensor)]
    _check_unique([one.name for one in found])
    return found


def _check_unique(names: Sequence[str]) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ModelError(f"two tensors are {name} of the checkpoint")
        seen.add(name)


def _stored(file: GgufFile, family: GgufFamily, name: str, tensor: GgufTensor) -> StoredTensor:
    part = tensor.name.split(".")[-2]
    if family.has_norm_offset and name.endswith("norm.weight"):
        return StoredTensor(name, tensor, has_norm_offset=True)
    if not family.is_interleaved or part not in INTERLEAVED:
        return StoredTensor(name, tensor)
    architecture = file.text("general.architecture")
    heads = file.size(f"{architecture}.attention.head_count")
    if part == "attn_k":
        heads = file.size(f"{architecture}.attention.head_count_kv", heads)
    if tensor.shape[0] % (2 * heads):
        raise ModelError(f"tensor {tensor.name} has {tensor.shape[0]} rows, which are not {heads} heads of even size")
    return StoredTensor(name, tensor, heads)


def _renamed(file: GgufFile, family: GgufFamily, tensor: GgufTensor) -> list[tuple[str, GgufTensor]]:
    """Returns checkpoint names and tensors, one for each expert. Raises ModelError for an unknown tensor."""
    match tensor.name.split("."):
        case [root, "weight" | "bias" as kind] if root in ROOTS:
            return [(f"{ROOTS[root]}.{kind}", tensor)]
        case ["blk", layer, part, "weight" | "bias" as kind] if part in family.parts:
            return [(f"model.layers.{layer}.{family.parts[part]}.{kind}", tensor)]
        case ["blk", layer, part, "weight"] if part in family.bare:
            return [(f"model.layers.{layer}.{family.bare[part]}", tensor)]
        case ["blk", layer, part, "weight" | "bias" as kind] if part in family.experts and len(tensor.shape) == _DIMENSIONS[kind]:
            name = f"model.layers.{layer}.{family.experts[part]}.{kind}"
            count = file.size(f"{file.text('general.architecture')}.expert_count")
            if tensor.shape[0] != count:
                raise ModelError(f"{file.path}: tensor {tensor.name} has {tensor.shape[0]} experts, not {count}")
            return [(name.format(number), tensor.part(number)) for number in range(count)]
    raise ModelError(f"{file.path}: tensor {tensor.name} belongs to no model that can be converted")
