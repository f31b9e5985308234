"""Places of the host tier's slots in the memory of the ranks.

A slot is a number that the eviction policy knows; it keeps it while its page moves. Places are the first `num_places` of that
memory, so that its end can be returned.
"""


class SlotPlaces:
    """Places 0 to num_places - 1, each free, taken for a page to come, or of one slot."""

    def __init__(self, num_places: int, limit: int) -> None:
        """limit: the largest number of places."""
        self.num_places = num_places
        self._unused = list(range(limit - 1, -1, -1))
        """Slots without a place."""
        self._free = list(range(num_places - 1, -1, -1))
        """The next one to take last."""
        self._place_of = [0] * limit
        self._slot_at: list[int | None] = [None] * limit

    @property
    def num_free(self) -> int:
        """Free places."""
        return len(self._free)

    @property
    def next_free(self) -> int:
        """The place that `take` returns; there is one."""
        return self._free[-1]

    def take(self) -> int:
        """Returns a free place, to `assign` or `free`."""
        return self._free.pop()

    def free(self, place: int) -> None:
        """Frees a place that no slot has."""
        self._free.append(place)

    def assign(self, place: int) -> int:
        """Returns an unused slot, which gets this place."""
        slot = self._unused.pop()
        self._place_of[slot], self._slot_at[place] = place, slot
        return slot

    def release(self, slot: int) -> int:
        """Frees the place of a slot, which is unused then. Returns the place."""
        place = self._place_of[slot]
        self._slot_at[place] = None
        self._unused.append(slot)
        self._free.append(place)
        return place

    def place_of(self, slot: int) -> int:
        """Returns the place of a used slot."""
        return self._place_of[slot]

    def slot_at(self, place: int) -> int:
        """Returns the slot at a place, which has one."""
        slot = self._slot_at[place]
        assert slot is not None, f"no slot is at place {place}"
        return slot

    def grow(self, num_places: int) -> None:
        """Adds places, which are taken after those that are free now."""
        self._free[:0] = range(num_places - 1, self.num_places - 1, -1)
        self.num_places = num_places

    def shrink(self, num_places: int) -> list[tuple[int, int]]:
        """Removes the places from `num_places` on; no taken one is among them, and slots there move to free ones.

        Returns the moves, from and to.
        """
        self._free = [place for place in self._free if place < num_places]
        moves = []
        for source in range(num_places, self.num_places):
            slot = self._slot_at[source]
            if slot is not None:
                target = self._free.pop()
                self._place_of[slot] = target
                self._slot_at[source], self._slot_at[target] = None, slot
                moves.append((source, target))
        self.num_places = num_places
        return moves

    def errors(self, slots: list[int], num_taken: int) -> list[str]:
        """Returns the errors, given the used slots and the number of taken places without one."""
        errors = [f"slot {slot} has no place" for slot in slots if self._slot_at[self._place_of[slot]] != slot]
        if any(place >= self.num_places for place in self._free):
            errors.append(f"a free place is not one of {self.num_places}")
        if self.num_free + len(slots) + num_taken != self.num_places:
            errors.append(f"{self.num_free} free and {len(slots)} used slots of {self.num_places}")
        return errors
