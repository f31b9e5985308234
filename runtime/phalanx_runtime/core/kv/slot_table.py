"""Which slot of the host tier each entry of its eviction policy has, and which slots the copies of the next plan use.

The policy knows an entry by its number, which stays while the page moves to another slot. Slots are the first `num_slots` of the
ranks' memory, so that the end of that memory can be returned.
"""

from collections import defaultdict
from collections.abc import Iterable

from phalanx_runtime.core.step_plan import HostCopy


class SlotTable:
    """Slots 0 to num_slots - 1, each free, taken for a page to come, or of one entry."""

    def __init__(self, num_slots: int, limit: int) -> None:
        """limit: the largest number of slots."""
        self.num_slots = num_slots
        self._unused = list(range(limit - 1, -1, -1))
        """Entries without a slot."""
        self._free = list(range(num_slots - 1, -1, -1))
        """The next one to take last."""
        self._slot_of = [0] * limit
        self._entry_at: list[int | None] = [None] * limit

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The slot that `take` returns; there is one."""
        return self._free[-1]

    def take(self) -> int:
        """Returns a free slot, to `assign` or `free`."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Frees a slot that no entry has."""
        self._free.append(slot)

    def assign(self, slot: int) -> int:
        """Returns an unused entry, which gets this slot."""
        entry = self._unused.pop()
        self._slot_of[entry], self._entry_at[slot] = slot, entry
        return entry

    def release(self, entry: int) -> int:
        """Frees the slot of an entry, which is unused then. Returns the slot."""
        slot = self._slot_of[entry]
        self._entry_at[slot] = None
        self._unused.append(entry)
        self._free.append(slot)
        return slot

    def slot_of(self, entry: int) -> int:
        """Returns the slot of a used entry."""
        return self._slot_of[entry]

    def entry_at(self, slot: int) -> int:
        """Returns the entry at a slot, which has one."""
        entry = self._entry_at[slot]
        assert entry is not None, f"no entry is at slot {slot}"
        return entry

    def grow(self, num_slots: int) -> None:
        """Adds slots, which are taken after those that are free now."""
        self._free[:0] = range(num_slots - 1, self.num_slots - 1, -1)
        self.num_slots = num_slots

    def shrink(self, num_slots: int) -> list[tuple[int, int]]:
        """Removes the slots from `num_slots` on; no taken one is among them, and entries there move to free ones.

        Returns the moves, from and to.
        """
        self._free = [slot for slot in self._free if slot < num_slots]
        moves = []
        for source in range(num_slots, self.num_slots):
            entry = self._entry_at[source]
            if entry is not None:
                target = self._free.pop()
                self._slot_of[entry] = target
                self._entry_at[source], self._entry_at[target] = None, entry
                moves.append((source, target))
        self.num_slots = num_slots
        return moves

    def errors(self, entries: list[int], num_taken: int) -> list[str]:
        """Returns the errors, given the used entries and the number of taken slots without one."""
        errors = [f"entry {entry} has no slot" for entry in entries if self._entry_at[self._slot_of[entry]] != entry]
        if any(slot >= self.num_slots for slot in self._free):
            errors.append(f"a free slot is not one of {self.num_slots}")
        if self.num_free + len(entries) + num_taken != self.num_slots:
            errors.append(f"{self.num_free} free and {len(entries)} used entries of {self.num_slots}")
        return errors


class PendingCopies:
    """Copies of the next plan, in order. A slot and a page are found without a search: a plan may have thousands of copies."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[HostCopy, bytes]] = {}
        """By number, in order, with the key of a stored page."""
        self._numbers_at: defaultdict[int, list[int]] = defaultdict(list)
        """Of the copies of each slot."""
        self._next_number = 0
        self.pages: set[int] = set()
        """Device pages that they read or write."""
        self.loading: set[int] = set()
        """Device pages that they write."""
        self._storing: dict[int, bytes] = {}
        """Device pages that they store, with the keys that find the slots."""

    def __len__(self) -> int:
        return len(self._copies)

    def uses(self, slot: int) -> bool:
        """Returns whether one of them reads or writes a slot."""
        return slot in self._numbers_at

    def store(self, page: int, slot: int, key: bytes) -> None:
        """Adds a copy of a device page to a slot."""
        self._add((False, page, slot), key)
        self._storing[page] = key

    def load(self, page: int, slot: int) -> None:
        """Adds a copy of a slot to a device page."""
        self._add((True, page, slot), b"")
        self.loading.add(page)

    def drop_at(self, slot: int) -> None:
        """Drops the stores to a slot, unless a load reads it."""
        numbers = self._numbers_at.get(slot, [])
        if any(self._copies[number][0][0] for number in numbers):
            return
        for number in numbers:
            (_, page, _), _ = self._copies.pop(number)
            self._storing.pop(page, None)
        self._numbers_at.pop(slot, None)

    def cancel(self, pages: Iterable[int]) -> dict[bytes, int]:
        """Drops the stores of device pages. Returns their keys, with the slots."""
        if not self._storing:
            return {}
        keys = {page: self._storing.pop(page) for page in pages if page in self._storing}
        slots = {}
        for number, ((is_load, page, slot), key) in list(self._copies.items()) if keys else ():
            if not is_load and page in keys:
                del self._copies[number]
                self._numbers_at[slot].remove(number)
                if not self._numbers_at[slot]:
                    del self._numbers_at[slot]
                slots[key] = slot
        return slots

    def take(self) -> list[tuple[HostCopy, bytes]]:
        """Removes and returns all, in order, each store with its key."""
        taken, self._copies = list(self._copies.values()), {}
        for used in (self._numbers_at, self.pages, self.loading, self._storing):
            used.clear()
        return taken

    def _add(self, copy: HostCopy, key: bytes) -> None:
        _, page, slot = copy
        self._copies[self._next_number] = copy, key
        self._numbers_at[slot].append(self._next_number)
        self._next_number += 1
        self.pages.add(page)
