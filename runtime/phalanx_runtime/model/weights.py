"""Reads slices of a checkpoint in safetensors, or in a GGUF file."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx_runtime.checkpoint.folder import GGUF_FILE, INDEX, indexed_files, weight_files
from phalanx_runtime.checkpoint.gguf.file import read_gguf
from phalanx_runtime.checkpoint.gguf.tensors import StoredTensor, stored_tensors
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.copies import open_staging
from phalanx_runtime.model.partition import Span
from phalanx_runtime.progress import WeightProgress

FP8 = "F8_E4M3"
"""The stored dtype of e4m3."""
_PREFIX, _BARE = "model.", "embed_tokens.weight"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names in config.json, by stored dtype."""

Index = slice | tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """A tensor that is dequantised when it is read, as `safetensors` has slices."""

    stored: StoredTensor

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        """Returns the dtype of reads."""
        return "F32"

    def __getitem__(self, index: Index) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        return _numbers(self.stored.float32(rows))[(slice(None), *others)]


class GgufHandle:
    """An open file, as `safe_open` opens safetensors."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self._tensors = {one.name: one for one in stored_tensors(read_gguf(path))}

    def keys(self) -> list[str]:
        """Returns the names of the checkpoint."""
        return list(self._tensors)

    def get_slice(self, name: str) -> GgufSlice:
        """Returns a tensor that is not read yet."""
        return GgufSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Returns the dequantised tensor."""
        return _numbers(self._tensors[name].float32())


def _numbers(array: npt.NDArray[np.float32]) -> Tensor:
    """Returns a tensor. Unquantised numbers are those of the mapped file, which torch must not write to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class Checkpoint:
    """An open checkpoint. Reads return new tensors on `device`: in `dtype`, or in another one that the caller names."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: Sequence[tuple[str, str]] = (),
        progress: WeightProgress | None = None,
    ) -> None:
        """`prefixes`: stored ones, and those by which the caller names tensors. `progress` counts the tensors."""
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._files, self._names = _named_as_causal(_tensor_files(folder), prefixes)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._staging = open_staging(device)
        self._progress = progress
        if progress is not None:
            progress.opened(self._files.values())

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._files

    def names(self) -> list[str]:
        """Returns all tensor names."""
        return list(self._files)

    def stored_dtype(self, name: str) -> str:
        """Returns a stored dtype as in the file: BF16, F8_E4M3."""
        return str(self._handle(name).get_slice(self._stored(name)).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a stored shape."""
        return tuple(self._handle(name).get_slice(self._stored(name)).get_shape())

    def part(self, name: str, select: Callable[[Any], Tensor] | None) -> Tensor:
        """Returns a tensor or `select` of its slice: possibly a view that is valid until the file closes.

        Without `select` it has the stored shape.
        """
        handle, stored = self._handle(name), self._stored(name)
        self._count(stored, handle.get_slice(stored))
        tensor: Tensor = handle.get_tensor(stored) if select is None else select(handle.get_slice(stored))
        return tensor

    def gguf_tensor(self, name: str) -> StoredTensor | None:
        """Returns the tensor as a GGUF file has it; None if the checkpoint has it in safetensors, or not at all."""
        if not self.has(name):
            return None
        handle = self._handle(name)
        return handle.get_slice(self._stored(name)).stored if isinstance(handle, GgufHandle) else None

    def gguf_bytes(self, name: str, rows: Span, columns: slice) -> Tensor:
        """Returns bytes of rows of such a tensor, uint8; `columns`: those of each row."""
        stored = self._handle(name).get_slice(self._stored(name))
        self._count(self._stored(name), stored)
        return torch.tensor(stored.stored.raw(slice(rows.start, rows.stop), columns))

    def vector(self, name: str, size: int, span: Span | None = None) -> Tensor:
        """Returns a vector, or `span` of it: [size] or [span.size]."""
        part = span or Span(0, size)
        return self._copy(self._slice(name, (size,))[part.start : part.stop])

    def rows(self, name: str, shape: tuple[int, int], span: Span, dtype: torch.dtype | None = None) -> Tensor:
        """Returns rows of a matrix of `shape`."""
        return self._copy(self._slice(name, shape, dtype)[span.start : span.stop], dtype)

    def columns(self, name: str, shape: tuple[int, int], span: Span, dtype: torch.dtype | None = None) -> Tensor:
        """Returns columns of a matrix of `shape`."""
        return self._copy(self._slice(name, shape, dtype)[:, span.start : span.stop], dtype)

    def block(self, name: str, shape: tuple[int, ...], spans: Sequence[Span]) -> Tensor:
        """Returns the part of a tensor of `shape` within a span of each dimension."""
        return self._copy(self._slice(name, shape)[tuple(slice(span.start, span.stop) for span in spans)])

    def _copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        # The slice may be a view of a file that closes after loading.
        target = torch.empty(tensor.shape, dtype=dtype or self.dtype, device=self.device)
        if self._staging is None:
            return target.copy_(tensor)
        self._staging.copy(tensor, target)
        return target

    def _close(self) -> None:
        """Closes the open file; only one is mapped at a time, to save memory."""
        self._open.clear()
        self._stack.close()

    def _slice(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        lazy = self._handle(name).get_slice(self._stored(name))
        path = self._files[name]
        if dtype is None and lazy.get_dtype() not in FLOATS:  # which may also change the shape
            raise ModelError(f"{path}: tensor {name} is stored as {lazy.get_dtype()}: its quantisation is not supported")
        if tuple(lazy.get_shape()) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {list(lazy.get_shape())}; config.json implies {list(shape)}")
        self._count(self._stored(name), lazy)
        return lazy

    def _count(self, stored: str, lazy: Any) -> None:
        if self._progress is None:
            return
        if isinstance(lazy, GgufSlice):
            self._progress.read(stored, lazy.stored.num_bytes)
        else:
            bits = re.search(r"\d+", lazy.get_dtype())
            self._progress.read(stored, math.prod(lazy.get_shape()) * int(bits[0] if bits else 8) // 8)

    def _stored(self, name: str) -> str:
        return self._names.get(name, name)

    def _handle(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        try:
            if path not in self._open:
                self._close()
                is_gguf = path.name == GGUF_FILE
                self._open[path] = GgufHandle(path) if is_gguf else self._stack.enter_context(safe_open(path, framework="pt"))
            self._open[path].get_slice(self._stored(name))
        except (SafetensorError, OSError, UnicodeEncodeError) as error:  # an index may have names that are no UTF-8
            raise ModelError(f"{path}: {error}") from error
        return self._open[path]


def weights_dtype(folder: Path) -> str:
    """Returns the dtype of the first weight in floats: that of the model where config.json has none. Raises ModelError."""
    with Checkpoint(folder, torch.float32, torch.device("cpu")) as checkpoint:
        found = (FLOATS.get(checkpoint.stored_dtype(name)) for name in checkpoint.names())
        return next((name for name in found if name), "float32")


def _named_as_causal(files: dict[str, Path], prefixes: Sequence[tuple[str, str]]) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns the files by the names of a causal language model, and the stored names where they differ.

    sentence-transformers stores the model without its head, and its tensors without the prefix.
    """
    is_bare = _BARE in files and _PREFIX + _BARE not in files
    stored = {_causal_name(name, is_bare, prefixes): name for name in files}
    return {name: files[old] for name, old in stored.items()}, {name: old for name, old in stored.items() if name != old}


def _causal_name(name: str, is_bare: bool, prefixes: Sequence[tuple[str, str]]) -> str:
    if is_bare:
        return name if name.startswith("lm_head.") else _PREFIX + name
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Reads the GGUF file or the index, else all *.safetensors."""
    gguf = folder / GGUF_FILE
    if gguf.is_symlink():
        return dict.fromkeys(GgufHandle(gguf).keys(), gguf)
    indexed = indexed_files(folder)
    if indexed is not None:
        for path in sorted(set(indexed.values())):
            if not path.exists():
                raise ModelError(f"{path} is missing: {INDEX} names it")
        return indexed
    paths = weight_files(folder)
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors")
    files = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as handle:
                files.update(dict.fromkeys(handle.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {error}") from error
    return files
