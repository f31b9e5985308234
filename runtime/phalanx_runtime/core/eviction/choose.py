"""The policy of a name."""

from collections.abc import Callable

from phalanx_runtime.core.eviction.orders import Fifo, Lfu, Lru
from phalanx_runtime.core.eviction.protocol import Eviction, PolicyName

_POLICIES: dict[PolicyName, Callable[[int, bytearray], Eviction]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo}


def make_eviction(name: PolicyName, num_pages: int, idle: bytearray) -> Eviction:
    """An empty policy for a pool. idle: the pool's flags, one byte a page, read whenever a victim is wanted."""
    return _POLICIES[name](num_pages, idle)
