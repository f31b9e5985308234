"""Slots of the ranks for snapshots of states, by page key; the least recently used one is replaced.

Slots after the first ones are in host memory. They get the snapshots that are replaced, and rows load from them directly: a
snapshot keeps its slot there when it is loaded. A disk below it (`core.kv.disk_tier`) also gets what is stored there, and fills
reserved slots.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

_BEFORE_ALL_PLANS = -1


@dataclass(frozen=True, slots=True)
class _Snapshot:
    slot: int
    step: int
    """Its plan saves the snapshot after the pass, or stores it after its loads, so only later plans load it."""
    num_tokens: int = 0
    """In the state; of a snapshot on the device."""
    is_stored: bool = False
    """Whether a plan has stored it in host memory while it kept its slot on the device."""


class SnapshotSlots:
    """Which page ends have a snapshot. A plan loads snapshots, then stores others in host memory, both before its pass, and saves
    others after it, each in order."""

    def __init__(self, num_slots: int, num_host_slots: int = 0, *, has_disk: bool = False) -> None:
        """num_host_slots: after the first `num_slots`. has_disk: the ranks also write stored snapshots to disk."""
        self._num_host_slots, self._has_disk = num_host_slots, has_disk
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_host = list(range(num_slots + num_host_slots - 1, num_slots - 1, -1))
        self._of: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._host: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._stores: list[tuple[int, int]] = []
        self._stored_keys: list[tuple[bytes, int]] = []
        self._reserved: set[int] = set()
        # Since the start.
        self.num_saved = 0
        self.num_stored = 0
        """In host memory."""
        self.num_loaded = 0
        """From host memory."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._of or key in self._host

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

    def keep(self, key: bytes) -> bool:
        """Returns whether a key has a snapshot, in host memory too, which is replaced late."""
        for snapshots in (self._of, self._host):
            if key in snapshots:
                snapshots.move_to_end(key)
        return key in self

    def never_stored(self) -> list[bytes]:
        """Returns the keys of snapshots on the device that have not been in host memory.

        Others that have left host memory are on disk: if each plan stored them again, a small host memory would get all of them
        from each plan.
        """
        return [key for key, snapshot in self._of.items() if not snapshot.is_stored and key not in self._host]

    def store(self, key: bytes, step: int) -> None:
        """Stores a snapshot, which keeps its slot on the device, in host memory too, by plan `step`."""
        snapshot = self._of[key]
        self._of[key] = replace(snapshot, is_stored=self._store(key, snapshot, step))

    def take(self, step: int) -> int | None:
        """Returns a slot for a new snapshot of plan `step`, if there is any; `name` or `give_back` follow."""
        if not self._free:
            if not self._of:
                return None
            key, snapshot = self._of.popitem(last=False)
            self._store(key, snapshot, step)
            self._free.append(snapshot.slot)
        return self._free.pop()

    def take_stores(self) -> tuple[list[tuple[int, int]], list[tuple[bytes, int]]]:
        """Removes and returns what the plan stores, see `StepPlan.state_stores` and `StepPlan.state_keys`."""
        stores, self._stores = self._stores, []
        keys, self._stored_keys = self._stored_keys, []
        return stores, keys

    def name(self, slot: int, key: bytes, step: int, num_tokens: int) -> None:
        """Lets `key`, which has no snapshot, find the one of `num_tokens` tokens that plan `step` saves to a slot."""
        self._of[key] = _Snapshot(slot, step, num_tokens)
        self.num_saved += 1

    def reserve(self, count: int) -> list[int]:
        """Reserves up to `count` slots in host memory, at most half of all, which later plans neither store nor load."""
        slots: list[int] = []
        while len(slots) < count and len(self._reserved) < self._num_host_slots // 2:
            slots.append(self._take_host())
            self._reserved.add(slots[-1])
        return slots

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Ends the reservation of `slots`, of which the first have the snapshots of `keys`."""
        self._reserved.difference_update(slots)
        for slot, key in zip_longest(slots, keys):
            if key is None or key in self._host:
                self._free_host.append(slot)
            else:
                self._host[key] = _Snapshot(slot, _BEFORE_ALL_PLANS)

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

    def _store(self, key: bytes, snapshot: _Snapshot, step: int) -> bool:
        """Stores a snapshot, unless plan `step` saves it. Returns whether it is in host memory."""
        if key in self._host:
            self._host.move_to_end(key)
        elif snapshot.step < step and (self._free_host or self._host):
            slot = self._take_host()
            self._host[key] = _Snapshot(slot, step)
            self._stores.append((snapshot.slot, slot))
            if self._has_disk:
                self._stored_keys.append((key, snapshot.num_tokens))
            self.num_stored += 1
        return key in self._host

    def _take_host(self) -> int:
        return self._free_host.pop() if self._free_host else self._host.popitem(last=False)[1].slot
