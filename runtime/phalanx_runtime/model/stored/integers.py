"""Reads parts of linear weights that a checkpoint stores in integer codes.

    layout          codes                                 scales                       zero points
    pack-quantized  weight_packed [out, in], words of in  weight_scale [out, groups]   weight_zero_point, words of out
    int-quantized   weight [out, in], int8                weight_scale [out, 1]        weight_zero_point, int8
    gptq            qweight [in, out], words of in        scales [groups, out]         qzeros [groups, out], words of out
    bitsandbytes    weight [out, in], int8                SCB [out], 127 times the scale
    awq             qweight [in, out], words of out       scales [groups, out]         qzeros [groups, out], words of out

`weight_g_idx` of pack-quantized and `g_idx` of gptq are the groups of the inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.checkpoint.schemes.integers import IntScheme
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.integer import IntWeight, unpack_words
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.weights import Checkpoint

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The field of each output of a word: fields have outputs 0, 2, 4, 6, 1, 3, 5, 7."""
_FLOATS = ("F16", "BF16", "F32")
_CODES = {
    "pack-quantized": "weight_packed",
    "int-quantized": "weight",
    "bitsandbytes": "weight",
    "awq": "qweight",
    "gptq": "qweight",
}


@dataclass(frozen=True, slots=True)
class IntegerReader:
    """Reads weights of one scheme. A linear is in integers if its codes are stored: lists of exceptions are not read."""

    checkpoint: Checkpoint
    scheme: IntScheme

    def is_stored(self, name: str) -> bool:
        """Whether the linear is stored in integers."""
        codes = f"{name}.{_CODES[self.scheme.layout]}"
        if not self.checkpoint.has(codes):
            return False
        return self.scheme.layout not in ("int-quantized", "bitsandbytes") or self.checkpoint.stored_dtype(codes) == "I8"

    def read(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> IntWeight:
        """Returns outputs `rows` and inputs `columns` of a linear of `shape`. Raises ModelError for tensors that do not fit."""
        self._check_shape(name, shape)
        codes, scales, zeros = self._codes(name, shape, rows, columns), self._scales(name, shape, rows), None
        if self.scheme.has_zeros:
            zeros = self._zeros(name, shape, rows)
        used, groups = torch.unique(self._groups(name, shape[1])[columns.start : columns.stop], return_inverse=True)
        zeros = None if zeros is None else zeros[:, used]
        if zeros is not None and bool((zeros == 1 << self.scheme.bits - 1).all()):
            zeros = None
        device = self.checkpoint.device
        return IntWeight(
            codes=codes.contiguous().to(device),
            scales=scales[:, used].contiguous().to(device),
            zeros=None if zeros is None else zeros.contiguous().to(device),
            groups=groups.to(device),
            bits=self.scheme.bits,
            dtype=self.checkpoint.dtype,
            rounds_inputs=self.scheme.rounds_inputs,
        )

    def _codes(self, name: str, shape: tuple[int, int], rows: Span, columns: Span) -> Tensor:
        tensor, turned = f"{name}.{_CODES[self.scheme.layout]}", (shape[1], shape[0])
        match self.scheme.layout:
            case "pack-quantized":
                return self._fields(tensor, shape, 1, (rows, columns))
            case "int-quantized" | "bitsandbytes":
                return self._part(tensor, shape, (rows, columns), ("I8",)).view(torch.uint8) ^ 128
            case "gptq":
                return self._fields(tensor, turned, 0, (columns, rows)).t()
            case "awq":
                return self._fields(tensor, turned, 1, (columns, rows)).t()

    def _scales(self, name: str, shape: tuple[int, int], rows: Span) -> Tensor:
        """Returns [rows, groups]."""
        if self.scheme.layout in ("awq", "gptq"):
            return self._part(f"{name}.scales", (self._num_groups(shape), shape[0]), (None, rows), _FLOATS).t()
        if self.scheme.layout == "bitsandbytes":
            return self._by_output(f"{name}.SCB", shape, rows, ("F32",)) / 127
        return self._by_output(f"{name}.weight_scale", shape, rows, _FLOATS)

    def _zeros(self, name: str, shape: tuple[int, int], rows: Span) -> Tensor:
        """Returns uint8 [rows, groups]."""
        num_groups, scheme = self._num_groups(shape), self.scheme
        if scheme.layout in ("awq", "gptq"):
            zeros = self._fields(f"{name}.qzeros", (num_groups, shape[0]), 1, (Span(0, num_groups), rows)).t()
            # AutoGPTQ stores the zero point 0 as the largest code.
            return zeros + scheme.zero_shift & (1 << scheme.bits) - 1
        full = f"{name}.weight_zero_point"
        if self.checkpoint.has(full) and self.checkpoint.stored_dtype(full) == "I8":  # versions before 0.9, and int-quantized
            return self._by_output(full, shape, rows, ("I8",)).view(torch.uint8) + (1 << scheme.bits - 1)
        return self._fields(full, (shape[0], num_groups), 0, (rows, Span(0, num_groups)))

    def _by_output(self, name: str, shape: tuple[int, int], rows: Span, dtypes: Sequence[str]) -> Tensor:
        """Returns [rows, groups] of a tensor that may have one number for the whole weight, or one dimension."""
        stored, num_groups = self.checkpoint.shape(name), self._num_groups(shape)
        if stored in ((), (1,), (1, 1)) and num_groups == 1:
            return self._part(name, stored, (), dtypes).reshape(1, 1).expand(rows.size, 1)
        if stored == (shape[0],) and num_groups == 1:
            return self._part(name, stored, (rows,), dtypes)[:, None]
        return self._part(name, (shape[0], num_groups), (rows,), dtypes)

    def _groups(self, name: str, inputs: int) -> Tensor:
        """Returns the group of each input."""
        size = inputs if self.scheme.group is None else min(self.scheme.group, inputs)
        contiguous = torch.arange(inputs) // size
        full = f"{name}.{'g_idx' if self.scheme.layout == 'gptq' else 'weight_g_idx'}"
        if not self.checkpoint.has(full):
            if self.scheme.has_order and self.scheme.group is not None:
                raise ModelError(f"tensor {full} is missing: {self.scheme.name} needs the group of each input")
            return contiguous
        stored = self._part(full, (inputs,), (), ("I32", "I64")).long()
        if self.scheme.layout == "pack-quantized" and bool((stored == -1).any()):  # it was never computed
            return contiguous
        if bool(((stored < 0) | (stored > contiguous[-1])).any()):
            raise ModelError(f"tensor {full} has groups outside of 0 to {int(contiguous[-1])}")
        return stored

    def _num_groups(self, shape: tuple[int, int]) -> int:
        return 1 if self.scheme.group is None else -(-shape[1] // self.scheme.group)

    def _check_shape(self, name: str, shape: tuple[int, int]) -> None:
        full = f"{name}.weight_shape"
        if self.scheme.layout != "pack-quantized" or not self.checkpoint.has(full):
            return
        stored = self._part(full, (2,), (), ("I32", "I64")).tolist()
        if stored != list(shape):
            raise ModelError(f"tensor {full} is {stored}; config.json implies {list(shape)}")

    def _fields(self, name: str, shape: tuple[int, int], axis: int, spans: tuple[Span, Span]) -> Tensor:
        """Returns the part within `spans` of a matrix of codes whose words are along `axis`: uint8."""
        bits, cut = self.scheme.bits, spans[axis]
        per_word = 32 // bits
        words = Span(cut.start // per_word, -(-cut.stop // per_word))
        stored = tuple(-(-size // per_word) if side == axis else size for side, size in enumerate(shape))
        found = self._part(name, stored, [words if side == axis else span for side, span in enumerate(spans)], ("I32",))
        fields = unpack_words(found if axis else found.t(), bits, _AWQ_ORDER if self.scheme.layout == "awq" else ())
        start = cut.start - words.start * per_word
        fields = fields[:, start : start + cut.size]
        return fields if axis else fields.t()

    def _part(self, name: str, shape: Sequence[int], spans: Sequence[Span | None], dtypes: Sequence[str]) -> Tensor:
        """Returns the part of a tensor within a span of each dimension, as stored. Raises ModelError if it does not fit."""
        if self.checkpoint.shape(name) != tuple(shape):
            stored = list(self.checkpoint.shape(name))
            raise ModelError(f"tensor {name} has shape {stored}; {self.scheme.name} implies {list(shape)}")
        if (dtype := self.checkpoint.stored_dtype(name)) not in dtypes:
            raise ModelError(f"tensor {name} is stored as {dtype}; {self.scheme.name} implies {' or '.join(dtypes)}")
        select = tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)
        take: Callable[..., Tensor] | None = (lambda lazy: lazy[select]) if select else None
        return self.checkpoint.part(name, take)
