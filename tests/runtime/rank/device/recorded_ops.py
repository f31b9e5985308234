"""Records the operators of a piece of work: their names, the memory that they share with others, and new memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"aten::slice.Tensor", "aten::alias", "aten::detach"}
"""Operators on whole tensors that move nothing."""


def storage_of(tensor: Tensor) -> int:
    """Returns the identity of a tensor's memory; of a fake tensor too."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


class RecordedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators while it is active. Memory of earlier operators is kept, so that identities stay unique."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.external: list[tuple[str, int, int]] = []
        """Operator, storage and offset of each tensor argument that no recorded operator made."""
        self.num_made = 0
        """Results in new memory."""
        self.devices: set[str] = set()
        self._made: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Records and runs one operator."""
        inputs = _tensors((args, kwargs or {}))
        known = {storage_of(tensor) for tensor in inputs}
        result = func(*args, **(kwargs or {}))
        outputs = _tensors(result)
        name = str(func.name())
        if name.startswith("prim::"):  # properties of a fake tensor
            return result
        self.names.append(name)
        self.devices |= {tensor.device.type for tensor in (*inputs, *outputs)}
        for tensor in inputs:
            if storage_of(tensor) not in self._made:
                self.external.append((name, storage_of(tensor), int(tensor.storage_offset())))
        for tensor in outputs:
            if storage_of(tensor) not in known:
                self.num_made += 1
                self._made.add(storage_of(tensor))
                self._kept.append(tensor)
        return result


def _tensors(tree: object) -> list[Tensor]:
    """Returns the tensors in arguments or results of an operator."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def record(work: Callable[[], object]) -> RecordedOps:
    """Runs `work` and returns its operators."""
    ops = RecordedOps()
    with torch.inference_mode(), ops:
        work()
    return ops


class ReplayedGraph:
    """Records the captured function; a replay queues nothing, as that of a device runs no Python."""

    def __init__(self, ops: list[RecordedOps]) -> None:
        self._ops = ops

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work`, as that of a device does."""
        work()

    def capture(self, work: Callable[[], None]) -> None:
        self._ops.append(record(work))

    def replay(self) -> None:
        pass
