"""Reads GGUF files. Source: ggml's docs/gguf.md.

The `gguf` package only dequantises: its reader takes seconds for a vocabulary of 50,000 tokens.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from phalanx_runtime.errors import ModelError

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
MAX_NUMBER = 1e30
_MAX_ENTRIES, _MAX_ITEMS, _MAX_DIMENSIONS = 1 << 16, 1 << 22, 4
"""Of tensors and of metadata keys, of an array and of a tensor: a broken file may claim, and hold, one per few bytes."""
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One memory-mapped tensor."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in numpy."""
    quantization: GGMLQuantizationType
    raw: npt.NDArray[np.uint8]
    """One row of bytes per row of the tensor."""

    def part(self, number: int) -> "GgufTensor":
        """Returns one of several tensors that are stored as one."""
        return GgufTensor(self.name, self.shape[1:], self.quantization, self.raw[number])

    def float32(self) -> npt.NDArray[np.float32]:
        """Dequantises. Raises ModelError for an unsupported quantisation."""
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # of scales that are no numbers
                values = dequantize(self.raw, self.quantization)
        except NotImplementedError as error:
            raise _unsupported(self.name, self.quantization.name) from error
        return np.ascontiguousarray(values.reshape(self.shape), dtype=np.float32)


def _unsupported(tensor: str, quantization: str) -> ModelError:
    supported = ", ".join(kind.name for kind in GGMLQuantizationType if _is_supported(kind))
    return ModelError(f"tensor {tensor}: quantisation {quantization} is not supported: use a file in {supported}")


def _is_supported(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, and tensors in file order."""

    path: Path
    metadata: dict[str, Value]
    tensors: list[GgufTensor]

    def text(self, key: str) -> str | None:
        """Returns a string, if present. Raises ModelError."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} must be a string, it is {value!r:.40}")
        return value

    def number(self, key: str) -> int | None:
        """Returns an integer, if present. Raises ModelError."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelError(f"{self.path}: {key} must be an integer, it is {value!r:.40}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer. Raises ModelError, also if it is absent without a default."""
        if key not in self.metadata and default is None:
            raise ModelError(f"{self.path} has no {key}")
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.path}: {key} must be a positive integer, it is {value!r:.40}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0 that fits fp32. Raises ModelError, also if it is absent without a default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise ModelError(f"{self.path}: {key} must be a number above 0, it is {value!r:.40}")
        return value

    def flag(self, key: str) -> bool:
        """Whether `key` is true."""
        return self.metadata.get(key) is True

    def texts(self, key: str) -> list[str]:
        """Returns a required list of strings. Raises ModelError."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.path}: {key} must be a list of strings")
        return [item for item in value if isinstance(item, str)]


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > len(self._buffer):
            raise ValueError("the file ends early")
        return self._buffer[start : self.position]

    def scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        if kind not in _FORMATS:
            raise ValueError(f"value type {kind} is unknown")
        value: Scalar = struct.unpack(_FORMATS[kind], self.take(struct.calcsize(_FORMATS[kind])))[0]
        return value

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.uint64()).decode("utf-8", "replace")

    def value(self) -> Value:
        kind = self.uint32()
        if kind != _ARRAY:
            return self.scalar(kind)
        kind, count = self.uint32(), _at_most(_MAX_ITEMS, self.uint64(), "values in an array")
        if kind in _FORMATS:
            size = struct.calcsize(_FORMATS[kind])
            return [item for (item,) in struct.iter_unpack(_FORMATS[kind], self.take(count * size))]
        return [self.scalar(kind) for _ in range(count)]


def _at_most(limit: int, count: int, of: str) -> int:
    if count > limit:
        raise ValueError(f"{count} {of}, at most {limit} are expected")
    return count


def read_gguf(path: Path) -> GgufFile:
    """Reads metadata and maps tensors. Raises ModelError."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as header:
            cursor = _Cursor(header)
            metadata, entries = _read_header(cursor)
            alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"general.alignment is {alignment!r}")
            start = -(-cursor.position // alignment) * alignment
        data = np.memmap(path, dtype=np.uint8, mode="r")
        tensors = [_tensor(data, name, shape, kind, start + offset) for name, shape, kind, offset in entries]
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error
    return GgufFile(path, metadata, tensors)


def _read_header(cursor: _Cursor) -> tuple[dict[str, Value], list[tuple[str, tuple[int, ...], int, int]]]:
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.uint32()
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}")
    num_tensors, num_keys = (_at_most(_MAX_ENTRIES, cursor.uint64(), of) for of in ("tensors", "metadata keys"))
    metadata = {cursor.string(): cursor.value() for _ in range(num_keys)}
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = _at_most(_MAX_DIMENSIONS, cursor.uint32(), f"dimensions of tensor {name:.80}")
        shape = tuple(reversed([cursor.uint64() for _ in range(num_dimensions)]))
        entries.append((name, shape, cursor.uint32(), cursor.uint64()))
    if len({name for name, *_ in entries}) < len(entries):
        raise ValueError("two tensors have the same name")
    return metadata, entries


def _tensor(data: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError as error:
        raise _unsupported(name, f"of ggml's number {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape:
        raise ValueError(f"tensor {name} has no values")
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name}: shape {shape} does not fit blocks of {block}")
    byte_shape = (*shape[:-1], shape[-1] // block * block_bytes)
    end = start + math.prod(byte_shape)
    if end > data.size:
        raise ValueError(f"the file ends early, in tensor {name}")
    return GgufTensor(name, shape, quantization, data[start:end].reshape(byte_shape))
