"""Reference eviction policies as lists, written from the papers."""

import math
from collections.abc import Callable

Idle = Callable[[bytes], bool]


def low_64(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


class SlowOrder:
    """LRU or FIFO: evicts the idle key with the smallest rank."""

    def __init__(self, rank: Callable[["SlowOrder", bytes], tuple[int, ...]]) -> None:
        self.rank = rank
        self.clock = 0
        self.inserted: dict[bytes, int] = {}
        self.released: dict[bytes, int] = {}

    def insert(self, key: bytes) -> None:
        self.clock += 1
        self.inserted[key] = self.clock

    def hit(self, key: bytes) -> None:
        pass

    def release(self, key: bytes) -> None:
        self.clock += 1
        self.released[key] = self.clock

    def remove(self, key: bytes) -> None:
        del self.inserted[key]

    def victim(self, idle: Idle) -> bytes:
        return min((key for key in self.inserted if idle(key)), key=lambda key: self.rank(self, key))


class SlowLfu(SlowOrder):
    """LFU whose uses count half after four accesses per key of the cache; scores of 1/256 doubling are equal."""

    def __init__(self, capacity: int) -> None:
        super().__init__(lambda order, key: (self.score(key), order.released[key]))
        self.half_life = 4 * capacity
        self.accesses = 0
        self.uses: dict[bytes, list[int]] = {}

    def insert(self, key: bytes) -> None:
        super().insert(key)
        self.uses[key] = []
        self.use(key)

    def hit(self, key: bytes) -> None:
        self.use(key)

    def use(self, key: bytes) -> None:
        self.accesses += 1
        self.uses[key].append(self.accesses)

    def score(self, key: bytes) -> int:
        times = self.uses[key]
        sum_of_uses = sum(2 ** ((time - times[-1]) / self.half_life) for time in times)
        return int(256 * (times[-1] / self.half_life + math.log2(sum_of_uses)))


class SlowSketch:
    """Count-min sketch: 4 rows of counters up to 15, halved after ten additions per page."""

    def __init__(self, capacity: int) -> None:
        self.width = 16
        while self.width < 4 * capacity:
            self.width *= 2
        self.rows = [[0] * self.width for _ in range(4)]
        self.capacity = capacity
        self.additions = 0

    def columns(self, key: bytes) -> list[int]:
        low, high = low_64(key) % 2**32, low_64(key) // 2**32
        return [(low + row * (high | 1)) % self.width for row in range(4)]

    def add(self, key: bytes) -> None:
        for row, column in zip(self.rows, self.columns(key), strict=True):
            row[column] = min(15, row[column] + 1)
        self.additions += 1
        if self.additions == 10 * self.capacity:
            self.rows = [[count // 2 for count in row] for row in self.rows]
            self.additions //= 2

    def estimate(self, key: bytes) -> int:
        return min(row[column] for row, column in zip(self.rows, self.columns(key), strict=True))


class ExactCounts(SlowSketch):
    """A sketch without collisions."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.counts: dict[bytes, int] = {}

    def add(self, key: bytes) -> None:
        self.counts[key] = min(15, self.counts.get(key, 0) + 1)
        self.additions += 1
        if self.additions == 10 * self.capacity:
            self.counts = {key: count // 2 for key, count in self.counts.items()}
            self.additions //= 2

    def estimate(self, key: bytes) -> int:
        return self.counts.get(key, 0)


class SlowWTinyLfu:
    """Window 1 %, main 99 %, of which 80 % are protected; lists by last use, the oldest first."""

    def __init__(self, capacity: int, counts: type[SlowSketch] = SlowSketch) -> None:
        self.counts = counts(capacity)
        self.window: list[bytes] = []
        self.probation: list[bytes] = []
        self.protected: list[bytes] = []
        self.max_window = max(1, capacity // 100)
        self.max_main = capacity - self.max_window
        self.max_protected = self.max_main * 4 // 5

    def insert(self, key: bytes) -> None:
        self.counts.add(key)
        self.window.append(key)
        while len(self.window) > self.max_window and len(self.probation) + len(self.protected) < self.max_main:
            self.probation.append(self.window.pop(0))

    def hit(self, key: bytes) -> None:
        self.counts.add(key)
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
        else:
            self.remove(key)
            self.protected.append(key)
            if len(self.protected) > self.max_protected:
                self.probation.append(self.protected.pop(0))

    def release(self, key: bytes) -> None:
        part = self.part_of(key)
        part.remove(key)
        part.append(key)

    def remove(self, key: bytes) -> None:
        self.part_of(key).remove(key)

    def victim(self, idle: Idle) -> bytes:
        newcomers = [key for key in self.window if idle(key)]
        residents = [key for key in self.probation + self.protected if idle(key)]
        if not newcomers or not residents:
            return (newcomers + residents)[0]
        if self.counts.estimate(newcomers[0]) <= self.counts.estimate(residents[0]):
            return newcomers[0]
        self.window.remove(newcomers[0])
        self.probation.append(newcomers[0])
        return residents[0]

    def part_of(self, key: bytes) -> list[bytes]:
        return next(part for part in (self.window, self.probation, self.protected) if key in part)


RANKS: dict[str, Callable[[SlowOrder, bytes], tuple[int, ...]]] = {
    "lru": lambda order, key: (order.released[key],),
    "fifo": lambda order, key: (order.inserted[key],),
}
"""Rank of a key by definition: the smallest is evicted first."""

SlowPolicy = SlowOrder | SlowWTinyLfu


def make_slow(name: str, capacity: int) -> SlowPolicy:
    """Returns the reference of a policy. Raises KeyError for a policy without one."""
    if name == "lfu":
        return SlowLfu(capacity)
    return SlowWTinyLfu(capacity) if name == "w-tinylfu" else SlowOrder(RANKS[name])


def slow_hits(policy: SlowPolicy, capacity: int, trace: list[bytes]) -> list[bool]:
    """Returns for each key of a trace without chains whether a cache of `capacity` keys has it."""
    held: set[bytes] = set()
    found = []
    for key in trace:
        found.append(key in held)
        if key in held:
            policy.hit(key)
        else:
            if len(held) == capacity:
                victim = policy.victim(lambda _: True)
                policy.remove(victim)
                held.remove(victim)
            held.add(key)
            policy.insert(key)
        policy.release(key)
    return found
