"""Which group loads a declared adapter. Pure.

no group holds it      the one with the most free slots loads it, then the one with the fewest requests
no slot is free        the group that unloads the adapter used least recently; if all have requests, the least busy group
all holders are full   an open group with a free slot loads it too; without one, a group with other content reads its files again
"""

from collections.abc import Collection
from dataclasses import dataclass

from phalanx_api import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterGroup:
    """A group that loads declared adapters."""

    key: str
    holds: bool
    is_loading: bool
    is_open: bool
    """One more request may be sent to it."""
    num_free: int
    """Slots that no adapter has or will have."""
    num_requests: int
    num_loads: int = 0
    """Loads in progress, and ordered ones."""
    idle_since: float | None = None
    """When the adapter that the next load unloads was used last; null: all have requests, or earlier loads unload them."""
    refused: wire.RefusedAdapter | None = None
    has_other: bool = False
    """It has other content under the name."""
    was_asked: bool = False
    """The router has ordered it to read the files again within the time in which it ignores another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a request for the adapter follows."""

    is_held: bool
    load: str = ""
    """Key of the group that is to load it; empty: none."""
    refused: wire.RefusedAdapter | None = None
    """Why no group can."""


def plan_load(groups: Collection[AdapterGroup]) -> LoadPlan:
    """Returns which group loads the adapter now."""
    holders = [group for group in groups if group.holds]
    others = [group for group in groups if not group.holds and not group.has_other]
    if any(group.is_loading for group in others) or any(group.is_open for group in holders):
        return LoadPlan(is_held=bool(holders))
    able = [group for group in others if group.refused is None]
    if holders:
        able = [group for group in able if group.is_open and group.num_free > 0] or _able_to_read_again(groups)
    if able:
        best = min(able, key=lambda group: (_slot_order(group), group.key))
        return LoadPlan(is_held=bool(holders), load=best.key)
    refusals = [group for group in groups if group.refused is not None]
    if holders or not refusals:
        return LoadPlan(is_held=bool(holders))
    # A group tries again what it refused a while ago. A reason that may pass is the better answer.
    retried = min(refusals, key=lambda group: (group.refused is not None and group.refused.is_final, group.key))
    return LoadPlan(is_held=False, load=retried.key, refused=retried.refused)


def _slot_order(group: AdapterGroup) -> tuple[float, ...]:
    """Returns a key that sorts groups by how soon they have a slot, then by load."""
    if group.num_free > 0:
        return 0, -group.num_free, group.num_requests
    if group.idle_since is not None:
        return 1, group.idle_since, group.num_requests
    return 2, group.num_loads, group.num_requests


def _able_to_read_again(groups: Collection[AdapterGroup]) -> list[AdapterGroup]:
    """Returns the groups with other content that may be asked; none while one of them reads."""
    others = [group for group in groups if group.has_other]
    if any(group.is_loading for group in others):
        return []
    return [group for group in others if group.is_open and group.refused is None and not group.was_asked]
