"""Slots of the ranks for snapshots of states, by page key; the least recently used one is replaced."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Snapshot:
    slot: int
    step: int
    """Its plan saves the snapshot after the pass, so only later plans load it."""


class SnapshotSlots:
    """Which page ends have a snapshot. A plan loads snapshots before its pass and saves others after it, in order."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._of: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self.num_saved = 0
        """Snapshots since the start."""

    def longest(self, keys: Sequence[bytes], step: int) -> int:
        """Returns the length of the longest prefix of a key chain that the plan `step` could load."""
        for index in range(len(keys) - 1, -1, -1):
            snapshot = self._of.get(keys[index])
            if snapshot is not None and snapshot.step < step:
                return index + 1
        return 0

    def use(self, key: bytes) -> int:
        """Returns the slot of a snapshot that exists."""
        self._of.move_to_end(key)
        return self._of[key].slot

    def has(self, key: bytes) -> bool:
        """Returns whether a key has a snapshot, which is used now."""
        if key in self._of:
            self._of.move_to_end(key)
        return key in self._of

    def take(self) -> int | None:
        """Returns a slot for a new snapshot, if there is any; `name` or `give_back` follow."""
        if not self._free:
            if not self._of:
                return None
            self._free.append(self._of.popitem(last=False)[1].slot)
        return self._free.pop()

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
        """Drops the snapshots of a plan that no rank computed, and those in the slots `lost`."""
        for key in [key for key, snapshot in self._of.items() if snapshot.step == step or snapshot.slot in lost]:
            self.drop(key)
