"""Eviction policies by name."""

from collections.abc import Callable

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import Adaptive
from phalanx_runtime.core.kv.eviction.orders import ORDERS
from phalanx_runtime.core.kv.eviction.protocol import Eviction
from phalanx_runtime.core.kv.eviction.tinylfu import WTinyLfu

FIXED: dict[str, Callable[[int, bytearray], Eviction]] = {**ORDERS, "w-tinylfu": WTinyLfu}
"""All policies but `adaptive`, which chooses among them."""


def make_eviction(name: EvictionPolicy, num_pages: int, idle: bytearray) -> Eviction:
    """Returns a new policy. `idle`: the pool's flags, one byte per page, read at each `victim`."""
    return Adaptive(num_pages, idle, FIXED) if name == "adaptive" else FIXED[name](num_pages, idle)
