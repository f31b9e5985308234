"""Which adapter of a full group leaves. Pure.

an idle one     the one that was used least recently
all are busy    a load that has waited for a while takes the slot of the one with the fewest requests
"""

from collections.abc import Iterable
from dataclasses import dataclass

UNUSED_S = 2.0
"""Time for the first request of a loaded adapter, before another one may take its slot."""
YIELD_S = 10.0
"""Wait of a load until an adapter with requests is unloaded for it. An adapter that was loaded less than this ago is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """A loaded adapter."""

    name: str
    is_declared: bool
    """Otherwise flags or a request to this pod loaded it."""
    num_requests: int
    """Open ones."""
    used_at: float | None
    """Time of its last request; null: none since it was loaded."""
    loaded_at: float


def choose_eviction(uses: Iterable[AdapterUse], now: float) -> str:
    """Returns the name of the adapter whose slot another one takes: the one used least recently. Empty: none may be unloaded."""
    idle = [use for use in uses if use.is_declared and not use.num_requests]
    ready = [use for use in idle if use.used_at is not None or now - use.loaded_at >= UNUSED_S]
    return min(ready, key=lambda use: (use.used_at or use.loaded_at, use.name)).name if ready else ""


def choose_yielding(uses: Iterable[AdapterUse], now: float) -> str:
    """Returns the name of the adapter that takes no more requests, so that another one gets its slot: the one with the fewest.

    Empty: none may. Without this choice, adapters whose requests never pause would keep all slots for ever.
    """
    able = [use for use in uses if use.is_declared and now - use.loaded_at >= YIELD_S]
    return min(able, key=lambda use: (use.num_requests, use.loaded_at, use.name)).name if able else ""
