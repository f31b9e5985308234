"""The policy that would find most lately, by ghost caches of the others, with hysteresis.

A change of policy has no pause: the next policy learns a few cached pages with every call, while the current one still names
the victims; when it knows all pages it takes over. Order of use and hits go over; order of insertion begins anew.
"""

from array import array
from collections.abc import Callable, Mapping

from phalanx_runtime.core.kv.eviction.protocol import Eviction

# Which policy would find most: small caches of keys without pages, one for each policy, over a sample of the keys.
#     a key is sampled if its leading bits are zero: 1 / 2^bits of the keys, in caches of 1 / 2^bits of the pool     score =
# hits of this period + 3/4 of the score before          period = half as many sampled keys as slots
# Pages of a chain are sampled on their own, so a ghost knows no leaf pages. Source: Waldspurger et al. 2015, SHARDS
# (sampling).

FEWEST_SLOTS = 64
MOST_SLOTS = 512
LEAD = 1.02
KEPT = 0.75
_KEY_BITS = 64


def sample_bits(num_pages: int) -> int:
    """1 key in 16, of a small pool more, of a large pool fewer: enough slots to tell policies apart, little work for each key."""
    return max(min(4, _log2(num_pages // FEWEST_SLOTS)), _log2(num_pages // MOST_SLOTS))


def _log2(ratio: int) -> int:
    return max(0, ratio.bit_length() - 1)


class GhostCache:
    """A cache of keys under one policy; it counts what it finds."""

    def __init__(self, slots: int, policy: Callable[[int, bytearray], Eviction]) -> None:
        self.hits = 0
        self._idle = bytearray(slots)
        self._policy = policy(slots, self._idle)
        self._slots: dict[int, int] = {}
        self._keys = [0] * slots
        self._free = list(range(slots))
        self._uses = 0

    def access(self, key: int) -> None:
        """Looks a key up, and keeps it."""
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
        self._uses += 1
        self._idle[slot] = 1
        self._policy.on_release(slot, self._uses)
        self._policy.on_idle(slot)

    def _evict(self) -> int:
        slot = self._policy.victim()
        self._idle[slot] = 0
        del self._slots[self._keys[slot]]
        self._policy.on_remove(slot)
        return slot


class GhostCaches:
    """One ghost for each policy, all shown the same sampled keys."""

    def __init__(self, num_pages: int, policies: Mapping[str, Callable[[int, bytearray], Eviction]]) -> None:
        bits = sample_bits(num_pages)
        slots = num_pages >> bits
        self._ghosts = {name: GhostCache(slots, policy) for name, policy in policies.items()}
        self._scores = dict.fromkeys(policies, 0.0)
        self._below = 1 << (_KEY_BITS - bits)
        self._period = max(1, slots // 2)
        self._seen = 0
        self._leader: str | None = None

    def access(self, key: int) -> bool:
        """Shows the ghosts a key that was found or inserted; whether a period ended, the time to ask for `better_than`."""
        if key >= self._below:
            return False
        for ghost in self._ghosts.values():
            ghost.access(key)
        self._seen += 1
        if self._seen < self._period:
            return False
        self._seen = 0
        for name, ghost in self._ghosts.items():
            self._scores[name] = KEPT * self._scores[name] + ghost.hits
            ghost.hits = 0
        return True

    def better_than(self, current: str) -> str | None:
        """The policy that found over 2 % more than the current one, in this period and the one before; else None."""
        best = max(self._scores, key=lambda name: (self._scores[name], name == current))
        leads = self._scores[best] > LEAD * self._scores[current]
        again = leads and best == self._leader
        self._leader = best if leads else None
        return best if again else None


PAGES_PER_CALL = 8
_MOST_HITS = 15


class Adaptive:
    """One of the given policies at a time, at first the first. `changes` are the names so far, that of now last."""

    def __init__(self, num_pages: int, idle: bytearray, policies: Mapping[str, Callable[[int, bytearray], Eviction]]) -> None:
        self._num_pages = num_pages
        self._idle = idle
        self._policies = policies
        self._ghosts = GhostCaches(num_pages, policies)
        self.changes = [next(iter(policies))]
        self._current = policies[self.changes[0]](num_pages, idle)
        self._next: Eviction | None = None
        self._told = 0
        """The next policy knows the cached pages below this one, and those inserted since it came."""
        self._known = bytearray(num_pages)
        self._cached = bytearray(num_pages)
        self._keys = array("Q", bytes(8 * num_pages))
        self._hits = array("q", bytes(8 * num_pages))
        self._released = array("q", bytes(8 * num_pages))

    @property
    def name(self) -> str:
        """The policy that names the victims now, or that is about to."""
        return self.changes[-1]

    def on_insert(self, page: int, key: int) -> None:
        """Takes note of the page."""
        self._cached[page] = 1
        self._keys[page] = key
        self._hits[page] = self._released[page] = 0
        self._current.on_insert(page, key)
        if self._next is not None:
            self._known[page] = 1
            self._next.on_insert(page, key)
        self._look(key)

    def on_hit(self, page: int) -> None:
        """Takes note of the hit."""
        self._hits[page] += 1
        self._current.on_hit(page)
        if self._next is not None and self._known[page]:
            self._next.on_hit(page)
        self._look(self._keys[page])

    def on_release(self, page: int, time: int) -> None:
        """Takes note of the time."""
        self._released[page] = time
        self._current.on_release(page, time)
        if self._next is not None and self._known[page]:
            self._next.on_release(page, time)

    def on_idle(self, page: int) -> None:
        """The page may go from now on."""
        self._current.on_idle(page)
        if self._next is not None and self._known[page]:
            self._next.on_idle(page)

    def on_remove(self, page: int) -> None:
        """Forgets the page."""
        self._cached[page] = 0
        self._current.on_remove(page)
        if self._next is not None and self._known[page]:
            self._known[page] = 0
            self._next.on_remove(page)

    def victim(self) -> int:
        """The page that the current policy names."""
        return self._current.victim()

    def _look(self, key: int) -> None:
        """Shows the ghosts a key; goes on with a change of policy, or begins one."""
        ended = self._ghosts.access(key)
        if self._next is not None:
            self._tell(self._next)
        elif ended:
            better = self._ghosts.better_than(self.name)
            if better is not None:
                self.changes.append(better)
                self._next = self._policies[better](self._num_pages, self._idle)
                self._told = 0
                self._known = bytearray(self._num_pages)

    def _tell(self, policy: Eviction) -> None:
        """Tells the next policy of some more pages; it takes over when it knows all."""
        end = min(self._told + PAGES_PER_CALL, self._num_pages)
        for page in range(self._told, end):
            if self._cached[page] and not self._known[page]:
                self._known[page] = 1
                policy.on_insert(page, self._keys[page])
                for _ in range(min(self._hits[page], _MOST_HITS)):
                    policy.on_hit(page)
                policy.on_release(page, self._released[page])
                if self._idle[page]:
                    policy.on_idle(page)
        self._told = end
        if end == self._num_pages:
            self._current, self._next = policy, None
