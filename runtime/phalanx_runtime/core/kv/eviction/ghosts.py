"""Which policy would find most: small caches of keys without pages, one for each policy, over a sample of the keys.

    a key is sampled if its leading bits are zero: 1 / 2^bits of the keys, in caches of 1 / 2^bits of the pool
    score = hits of this period + 3/4 of the score before          period = half as many sampled keys as slots

Pages of a chain are sampled on their own, so a ghost knows no leaf pages. Source: Waldspurger et al. 2015, SHARDS (sampling).
"""

from collections.abc import Callable, Mapping

from phalanx_runtime.core.kv.eviction.protocol import Eviction

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


class Ghost:
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


class Ghosts:
    """One ghost for each policy, all shown the same sampled keys."""

    def __init__(self, num_pages: int, policies: Mapping[str, Callable[[int, bytearray], Eviction]]) -> None:
        bits = sample_bits(num_pages)
        slots = num_pages >> bits
        self._ghosts = {name: Ghost(slots, policy) for name, policy in policies.items()}
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
