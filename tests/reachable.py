"""The texts that objects of the product keep: those of what has gone must not be among them."""

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType

OUTSIDE = ("tests.", "bench.", "_asyncio", "asyncio", "logging")
"""Modules of objects that are not entered."""


def texts(root: object) -> Iterator[str]:
    """Yields each text that can be reached from an object, without those of test code, classes, modules and tasks."""
    seen, waiting = dict[int, object](), [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found  # alive, so that no other object has its id
        if isinstance(found, str):
            yield found
        elif isinstance(found, FunctionType):
            waiting += found.__closure__ or ()  # its globals are a module's
        elif not isinstance(found, type | ModuleType) and not type(found).__module__.startswith(OUTSIDE):
            waiting += gc.get_referents(found)
            waiting += found if isinstance(found, dict) else ()  # the collector skips keys that are texts
