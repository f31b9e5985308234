"""Slots of the ranks for snapshots of states, by page key; the least recently used one is replaced.

Slots after the first ones are in host memory. They get the snapshots that are replaced, and rows load from them directly: a
snapshot keeps its slot there when it is loaded.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Snapshot:
    slot: int
    step: int
    """Its plan saves the snapshot after the pass, or stores it after its loads, so only later plans load it."""


class SnapshotSlots:
    """Which page ends have a snapshot. A plan loads snapshots, then stores others in host memory, both before its pass, and saves
    others after it, each in order."""

    def __init__(self, num_slots: int, num_host_slots: int = 0) -> None:
        """num_host_slots: after the first `num_slots`."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_host = list(range(num_slots + num_host_slots - 1, num_slots - 1, -1))
        self._of: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._host: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._stores: list[tuple[int, int]] = []
        # Since the start.
        self.num_saved = 0
        self.num_stored = 0
        """In host memory."""
        self.num_loaded = 0
        """From host memory."""

    def longest(self, keys: Sequence[bytes], step: int) -> int:
        """Returns the length of the longest prefix of a key chain that the plan `step` could load."""
        for index in range(len(keys) - 1, -1, -1):
            if self._loadable(keys[index], step) is not None:
                return index + 1
        return 0

    def use(self, key: bytes, step: int) -> int:
        """Returns the slot of a snapshot that the plan `step` can load."""
        snapshots = self._loadable(key, step)
        assert snapshots is not None, "found by `longest`"
        snapshots.move_to_end(key)
        self.num_loaded += snapshots is self._host
        return snapshots[key].slot

    def has(self, key: bytes) -> bool:
        """Returns whether a key has a snapshot, which is used now."""
        if key in self._of:
            self._of.move_to_end(key)
        return key in self._of

    def take(self, step: int) -> int | None:
        """Returns a slot for a new snapshot of plan `step`, if there is any; `name` or `give_back` follow."""
        if not self._free:
            if not self._of:
                return None
            key, snapshot = self._of.popitem(last=False)
            self._store(key, snapshot, step)
            self._free.append(snapshot.slot)
        return self._free.pop()

    def take_stores(self) -> list[tuple[int, int]]:
        """Removes and returns what the plan stores: (slot, slot in host memory)."""
        stores, self._stores = self._stores, []
        return stores

    def name(self, slot: int, key: bytes, step: int) -> None:
        """Lets `key`, which has no snapshot, find the one that plan `step` saves to a slot."""
        self._of[key] = _Snapshot(slot, step)
        self.num_saved += 1

    def give_back(self, slot: int) -> None:
        """Frees a slot without a key."""
        self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Frees the slot of a snapshot, if it exists."""
        snapshot = self._of.pop(key, None)
        if snapshot is not None:
            self._free.append(snapshot.slot)

    def take_back(self, step: int, lost: Collection[int] = ()) -> None:
        """Drops the snapshots of a plan that no rank computed, and those in the slots `lost`.

        The plan may have stored these in host memory, so with any lost slot all that it stored are dropped too.
        """
        for key in [key for key, snapshot in self._of.items() if snapshot.step == step or snapshot.slot in lost]:
            self.drop(key)
        stored = step if lost else None
        for key in [key for key, snapshot in self._host.items() if snapshot.slot in lost or snapshot.step == stored]:
            self._free_host.append(self._host.pop(key).slot)

    def _loadable(self, key: bytes, step: int) -> OrderedDict[bytes, _Snapshot] | None:
        """Returns the snapshots among which the plan `step` finds a key."""
        for snapshots in (self._of, self._host):
            snapshot = snapshots.get(key)
            if snapshot is not None and snapshot.step < step:
                return snapshots
        return None

    def _store(self, key: bytes, snapshot: _Snapshot, step: int) -> None:
        """Stores a snapshot that loses its slot, unless its own plan is the one that replaces it."""
        if key in self._host:
            self._host.move_to_end(key)
        elif snapshot.step < step and (self._free_host or self._host):
            slot = self._free_host.pop() if self._free_host else self._host.popitem(last=False)[1].slot
            self._host[key] = _Snapshot(slot, step)
            self._stores.append((snapshot.slot, slot))
            self.num_stored += 1
