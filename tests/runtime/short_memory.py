"""Memory that an operator lacks, as the allocator of a device reports it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WHY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class ShortMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises as the allocator of a device does, at the calls of one operator with these numbers, from 1."""

    def __init__(self, operator: str, *calls: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator = operator
        self._calls = calls
        self.num_calls = self.num_raised = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if str(func.name()) == self._operator:
            self.num_calls += 1
            if self.num_calls in self._calls:
                self.num_raised += 1
                raise torch.OutOfMemoryError(f"{WHY}\nSee the documentation for memory management.")
        return func(*args, **(kwargs or {}))
