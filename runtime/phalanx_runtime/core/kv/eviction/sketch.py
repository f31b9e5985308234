"""How often keys were seen lately, in little room: a count-min sketch of 4-bit counters that ages.

    estimate(key) = min over 4 rows of counter[row, (low + row * high) mod width]        never below the true count, up to 15
    after `10 * capacity` additions every counter is halved

Source: Einziger, Friedman, Manes 2017, TinyLFU (sections 3.2 to 3.4).
"""

ROWS = 4
AGING = 10
_LOW = 0xFFFFFFFF
_HALVED = bytes(byte >> 1 & 0x77 for byte in range(256))


class Sketch:
    """Counters for about `capacity` keys of 64 well-mixed bits. Two counters share a byte."""

    __slots__ = ("_additions", "_mask", "_sample", "_table", "_width")

    def __init__(self, capacity: int) -> None:
        self._width = 1 << max(4, (4 * capacity - 1).bit_length())
        self._mask = self._width - 1
        self._table = bytearray(ROWS * self._width // 2)
        self._sample = AGING * capacity
        self._additions = 0

    def add(self, key: int) -> None:
        """Counts the key once more; halves all counts when it is time. A counter stays at 15."""
        table, mask, base = self._table, self._mask, 0
        low, high = key & _LOW, key >> 32 | 1
        for _ in range(ROWS):
            at = base + (low & mask)
            byte = table[at >> 1]
            if at & 1:
                if byte < 0xF0:
                    table[at >> 1] = byte + 0x10
            elif byte & 0x0F < 0x0F:
                table[at >> 1] = byte + 1
            low += high
            base += self._width
        self._additions += 1
        if self._additions >= self._sample:
            self._table = table.translate(_HALVED)
            self._additions //= 2

    def estimate(self, key: int) -> int:
        """How often the key was seen, or a little more."""
        table, mask, base = self._table, self._mask, 0
        low, high, least = key & _LOW, key >> 32 | 1, 15
        for _ in range(ROWS):
            at = base + (low & mask)
            byte = table[at >> 1]
            count = byte >> 4 if at & 1 else byte & 0x0F
            if count < least:
                least = count
            low += high
            base += self._width
        return least
