"""The policy of a name."""

from collections.abc import Callable

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import Adaptive
from phalanx_runtime.core.kv.eviction.orders import Fifo, Lfu, Lru
from phalanx_runtime.core.kv.eviction.protocol import Eviction
from phalanx_runtime.core.kv.eviction.tinylfu import WTinyLfu

_FIXED: dict[str, Callable[[int, bytearray], Eviction]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo, "w-tinylfu": WTinyLfu}


def make_eviction(name: EvictionPolicy, num_pages: int, idle: bytearray) -> Eviction:
    """An empty policy for a pool. idle: the pool's flags, one byte a page, read whenever a victim is wanted."""
    return Adaptive(num_pages, idle, _FIXED) if name == "adaptive" else _FIXED[name](num_pages, idle)
