"""Eviction policies by name."""

from collections.abc import Callable

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import Adaptive
from phalanx_runtime.core.kv.eviction.orders import Fifo, Lfu, Lru
from phalanx_runtime.core.kv.eviction.protocol import Eviction
from phalanx_runtime.core.kv.eviction.tinylfu import WTinyLfu

_FIXED: dict[str, Callable[[int, bytearray], Eviction]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo, "w-tinylfu": WTinyLfu}


def make_eviction(name: EvictionPolicy, num_pages: int, idle: bytearray) -> Eviction:
    """Returns a new policy. `idle`: the pool's flags, one byte per page, read at each `victim`."""
    return Adaptive(num_pages, idle, _FIXED) if name == "adaptive" else _FIXED[name](num_pages, idle)
