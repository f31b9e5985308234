"""Switches to the eviction policy with the most hits in ghost caches.

A switch is incremental: each call transfers some pages to the next policy, which takes over when it has all. `make_eviction`
makes any policy by name.
"""

from array import array
from collections.abc import Callable, Mapping

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.orders import ORDERS, Eviction, FadingUses
from phalanx_runtime.core.kv.eviction.tinylfu import WTinyLfu

MIN_GHOST_SLOTS = 64
MAX_GHOST_SLOTS = 512
LEAD = 1.02
"""Ratio of scores that a better policy must exceed in two periods."""
SCORE_DECAY = 0.75
_KEY_BITS = 64

PolicyClass = Callable[[int, bytearray], Eviction]


def sample_bits(num_pages: int) -> int:
    """Returns b such that 1 key in 2^b is sampled."""
    return max(min(4, _log2(num_pages // MIN_GHOST_SLOTS)), _log2(num_pages // MAX_GHOST_SLOTS))


def _log2(ratio: int) -> int:
    return max(0, ratio.bit_length() - 1)


class GhostCache:
    """A cache of keys without pages; counts hits."""

    def __init__(self, slots: int, policy: PolicyClass) -> None:
        self.hits = 0
        self._idle = bytearray(slots)
        self._policy = policy(slots, self._idle)
        self._slots: dict[int, int] = {}
        self._keys = [0] * slots
        self._free = list(range(slots))
        self._num_accesses = 0

    def access(self, key: int) -> None:
        """Looks up a key, and inserts a missing one."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._slots[key] = slot
            self._keys[slot] = key
            self._policy.on_insert(slot, key)
        else:
            self.hits += 1
            self._idle[slot] = 0
            self._policy.on_hit(slot)
        self._num_accesses += 1
        self._idle[slot] = 1
        self._policy.on_release(slot, self._num_accesses)
        self._policy.on_idle(slot)

    def _evict(self) -> int:
        slot = self._policy.victim()
        self._idle[slot] = 0
        del self._slots[self._keys[slot]]
        self._policy.on_remove(slot)
        return slot


class GhostCaches:
    """One ghost cache per policy, with the same sample of keys.

    sampled: keys with b leading zero bits, in caches of 1 / 2^b of the pool
    score = hits of this period + 3/4 of the previous score          period = half as many sampled keys as slots

    Pages of a chain are sampled independently. Source: Waldspurger et al. 2015, SHARDS.
    """

    def __init__(self, num_pages: int, policies: Mapping[str, PolicyClass]) -> None:
        bits = sample_bits(num_pages)
        slots = num_pages >> bits
        self._ghosts = {name: GhostCache(slots, policy) for name, policy in policies.items()}
        self._scores = dict.fromkeys(policies, 0.0)
        self.sample_bound = 1 << (_KEY_BITS - bits)
        """Keys below it are sampled."""
        self._period = max(1, slots // 2)
        self._num_sampled = 0
        self._leader: str | None = None

    def access(self, key: int) -> bool:
        """Passes a found or inserted key to the ghosts. Returns whether a period ended."""
        if key >= self.sample_bound:
            return False
        for ghost in self._ghosts.values():
            ghost.access(key)
        self._num_sampled += 1
        if self._num_sampled < self._period:
            return False
        self._num_sampled = 0
        for name, ghost in self._ghosts.items():
            self._scores[name] = SCORE_DECAY * self._scores[name] + ghost.hits
            ghost.hits = 0
        return True

    def better_than(self, current: str) -> str | None:
        """Returns the policy that exceeded the current one by `LEAD` in two periods, if any."""
        best = max(self._scores, key=lambda name: (self._scores[name], name == current))
        leads = self._scores[best] > LEAD * self._scores[current]
        led_before = leads and best == self._leader
        self._leader = best if leads else None
        return best if led_before else None


PAGES_PER_CALL = 8
_MAX_REPLAYED_HITS = 15


class Adaptive:
    """Uses one of the policies at a time, initially the first."""

    def __init__(self, num_pages: int, idle: bytearray, policies: Mapping[str, PolicyClass]) -> None:
        self._num_pages = num_pages
        self._idle = idle
        self._policies = policies
        self._ghosts = GhostCaches(num_pages, policies)
        self.changes = [next(iter(policies))]
        """Names of the policies so far."""
        self._current = policies[self.changes[0]](num_pages, idle)
        self._next: Eviction | None = None
        self._num_transferred = 0
        """The next policy has the pages below it."""
        self._in_next = bytearray(num_pages)
        self._cached = bytearray(num_pages)
        self._keys = array("Q", bytes(8 * num_pages))
        self._uses = FadingUses(num_pages)
        self._released = array("q", bytes(8 * num_pages))

    @property
    def name(self) -> str:
        """The current policy, or the next one during a switch."""
        return self.changes[-1]

    def on_insert(self, page: int, key: int) -> None:
        """Records the page."""
        self._cached[page] = 1
        self._keys[page] = key
        self._uses.insert(page)
        self._released[page] = 0
        self._current.on_insert(page, key)
        if self._next is not None:
            self._in_next[page] = 1
            self._next.on_insert(page, key)
        self._compare(key)

    def on_hit(self, page: int) -> None:
        """Counts the hit."""
        self._uses.hit(page)
        self._current.on_hit(page)
        if self._next is not None and self._in_next[page]:
            self._next.on_hit(page)
        self._compare(self._keys[page])

    def on_release(self, page: int, time: int) -> None:
        """Records the time."""
        self._released[page] = time
        self._current.on_release(page, time)
        if self._next is not None and self._in_next[page]:
            self._next.on_release(page, time)

    def on_idle(self, page: int) -> None:
        """Passes the event on."""
        self._current.on_idle(page)
        if self._next is not None and self._in_next[page]:
            self._next.on_idle(page)

    def on_remove(self, page: int) -> None:
        """Removes the page."""
        self._cached[page] = 0
        self._current.on_remove(page)
        if self._next is not None and self._in_next[page]:
            self._in_next[page] = 0
            self._next.on_remove(page)

    def victim(self) -> int:
        """Returns the current policy's victim."""
        return self._current.victim()

    def _compare(self, key: int) -> None:
        has_scores = self._ghosts.access(key)
        if self._next is not None:
            self._transfer(self._next)
        elif has_scores:
            better = self._ghosts.better_than(self.name)
            if better is not None:
                self.changes.append(better)
                self._next = self._policies[better](self._num_pages, self._idle)
                self._num_transferred = 0
                self._in_next = bytearray(self._num_pages)

    def _transfer(self, policy: Eviction) -> None:
        end = min(self._num_transferred + PAGES_PER_CALL, self._num_pages)
        for page in range(self._num_transferred, end):
            if self._cached[page] and not self._in_next[page]:
                self._in_next[page] = 1
                policy.on_insert(page, self._keys[page])
                for _ in range(min(self._uses.hits(page), _MAX_REPLAYED_HITS)):
                    policy.on_hit(page)
                policy.on_release(page, self._released[page])
                if self._idle[page]:
                    policy.on_idle(page)
        self._num_transferred = end
        if end == self._num_pages:
            self._current, self._next = policy, None


FIXED: dict[str, PolicyClass] = {**ORDERS, "w-tinylfu": WTinyLfu}
"""All policies but `adaptive`, which chooses among them."""


def make_eviction(name: EvictionPolicy, num_pages: int, idle: bytearray) -> Eviction:
    """Returns a new policy. `idle`: the pool's flags, one byte per page, read at each `victim`."""
    return Adaptive(num_pages, idle, FIXED) if name == "adaptive" else FIXED[name](num_pages, idle)
