"""Counts the kernel launches of a computation, also of one on fake tensors of a GPU that this machine lacks.

Use it within `torch.no_grad`: in inference mode torch passes composite operators, such as `reshape`, undivided.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators of torch that allocate and write nothing."""
UNMARKED_VIEWS = frozenset({"_unsafe_view", "detach", "lift_fresh"})
"""Views that torch does not mark as such."""


class LaunchCounter(TorchDispatchMode):
    """Records the operators that launch a kernel: all but views, allocations and reads of metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """In order: `aten::mm`, `phalanx::gate`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if launches(func):
            self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def launches(func: Any) -> bool:
    """Whether an operator of torch launches a kernel on a GPU."""
    namespace, _, name = func.name().partition(".")[0].partition("::")
    returns_tensor = any("Tensor" in str(returned.type) for returned in func._schema.returns)
    is_effect = namespace == "phalanx" or returns_tensor
    return is_effect and not func.is_view and not (namespace == "aten" and name in ALLOCATIONS | UNMARKED_VIEWS)


def launches_of(work: Callable[[], object]) -> list[str]:
    """Returns the operators that `work` launches, in order."""
    with torch.no_grad(), LaunchCounter() as counter:
        work()
    return counter.names
