"""Counts the kernel launches of a computation, also of one on fake tensors of a GPU that this machine lacks.

Use it within `torch.no_grad`: in inference mode torch passes composite operators, such as `reshape`, undivided.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SILENT = ("phalanx::", "aten::_foreach_")
"""Operators that launch and may return nothing."""
ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operators that allocate and write nothing."""
UNMARKED_VIEWS = frozenset({"aten::_unsafe_view", "aten::detach", "aten::lift_fresh"})
"""Views that torch does not mark as such."""
COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::to"})
"""Operators that may copy between devices."""


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that launch a kernel: all but views, allocations and reads of metadata."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        """In order: `aten::mm`, `phalanx::gate`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        has_effect = name.startswith(SILENT) or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if has_effect and not func.is_view and name not in ALLOCATIONS | UNMARKED_VIEWS:
            self.names.append(name)
        return result


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails at a copy between host and device for which the host waits. Fake tensors fail only when a value is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        if func.name().partition(".")[0] in COPIES and len(devices) > 1:
            is_queued = (kwargs or {}).get("non_blocking") or args[2:3] == (True,)
            assert is_queued, f"{func.name()} between {sorted(devices)} waits for the device"
        return result


def launches_of(work: Callable[[], object]) -> list[str]:
    """Returns the operators that `work` launches, in order."""
    counter = LaunchCounter()
    with torch.no_grad(), counter:
        work()
    return counter.names
