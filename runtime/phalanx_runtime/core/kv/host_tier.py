"""Pages in host memory: the second tier of the prefix cache.

    a device page with a key is evicted      `store`: its content is copied to a slot, which the key finds from then on
    a prompt's page is in a slot             `load`: it is copied to a device page, if that is faster than computing it

Plans name slots, the first `num_slots` of each rank's host memory; the policy knows an entry for each page, which keeps its
number in another slot (`slot_table`). A smaller tier evicts pages as its policy says, and moves those in removed slots.

Rank 0 decides; plans carry the copies, and each rank copies its own part of a page. All ranks execute the copies of all plans in
order, so a slot may be stored, loaded and stored again in one plan. A slot keeps its page when the page is loaded: evicting the
device page again then needs no copy.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.copy_fit import CopyFit
from phalanx_runtime.core.kv.eviction.adaptive import make_eviction
from phalanx_runtime.core.kv.slot_table import PendingCopies, SlotTable
from phalanx_runtime.core.kv.tier_hits import TierHits
from phalanx_runtime.core.kv.tier_sizing import SizingRules, choose_size
from phalanx_runtime.core.step_plan import HostCopy, HostResize

RESIZE_SLOTS = 64
"""Slots that one plan adds or removes at most: pages that move delay the copies of the next plan."""


@dataclass(slots=True, kw_only=True)
class HostCounters:
    """Pages since the start."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    evicted_page_s: float = 0.0
    """Seconds from storing to eviction, summed over evicted pages."""
    resized: int = 0
    """Plans that change the number of slots."""
    moved: int = 0
    """Moved to another slot because theirs was removed."""
    declined: int = 0
    """Found, but faster to compute than to load."""
    waited_s: float = 0.0
    """Seconds that steps waited for copies."""
    sent: int = 0
    """Sent to other groups."""


class HostTier:
    """Slots, each free or found by a key; without any every call finds nothing."""

    def __init__(
        self,
        num_slots: int = 0,
        eviction: EvictionPolicy = "lru",
        *,
        has_disk: bool = False,
        num_device_pages: int = 1,
        rules: SizingRules | None = None,
        follows: "HostTier | None" = None,
    ) -> None:
        """has_disk: the ranks also write stored pages to disk, by key. rules: of an adaptive number of slots.

        follows: the tier of the pages whose parts this one has, in proportion to its size.
        """
        self.rules = rules or SizingRules.fixed(num_slots)
        limit, self._wanted_slots = self.rules.limit, self.rules.floor
        self._table = SlotTable(self.rules.floor, limit)
        self._follows, num_pages = follows, limit or num_device_pages
        self.hits: TierHits = follows.hits if follows else TierHits(num_pages, has_host=limit > 0, has_disk=has_disk)
        """Of pages."""
        self._has_disk = has_disk
        self.counters = HostCounters()
        self._loads = CopyFit()
        self.sized_why = ""
        """Reason of the latest decision to change the size."""
        self._decided_at = 0  # lookups before the latest decision
        self._entry_of: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * limit
        self.now_s = 0.0
        """Monotonic seconds, set with each load report."""
        self._stored_s = array("d", bytes(8 * limit))
        self._idle = bytearray(max(1, limit))
        """1: used. Chains are not tracked: a page that lost the one before it is found again once that is stored."""
        self._policy = make_eviction(eviction, len(self._idle), self._idle)
        self._time = 0
        self._pending = PendingCopies()
        self._reserved: set[int] = set()  # slots that pages from elsewhere will fill
        self._pins: Counter[int] = Counter()
        """Entries that are neither evicted nor moved, with the number of users, such as ranks that read them for other groups."""
        self._filled: set[int] = set()
        """Slots with such a page that no prompt loaded yet."""

    @property
    def num_slots(self) -> int:
        """The present size."""
        return self._table.num_slots

    def __contains__(self, key: bytes) -> bool:
        return key in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def keys(self) -> Iterable[bytes]:
        """Returns the keys of all slots."""
        return self._entry_of.keys()

    def store(self, page: int, key: bytes) -> bytes | None:
        """Copies a device page, which nothing writes before the next plan, to a slot. Returns the key that loses its slot."""
        if self._follows is None:
            self.hits.evict(key)
        if not self.num_slots:
            return None
        if key in self._entry_of:
            self._touch(self._entry_of[key])
            return None
        dropped = None if self._table.num_free else self._evict()
        slot = self._table.take()
        self._insert(slot, key)
        self._pending.store(page, slot, key)
        self.counters.stored += 1
        return dropped

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the slots of the longest found prefix of `keys`, until the next change of the size."""
        slots = []
        for key in keys:
            entry = self._entry_of.get(key)
            if entry is None:
                break
            slots.append(self._table.slot_of(entry))
        return slots

    def keep(self, keys: Iterable[bytes]) -> int:
        """Counts a hit of the longest found prefix, so that these slots are evicted late, the first last. Returns its length."""
        found = list(takewhile(self._entry_of.__contains__, keys))
        for key in reversed(found):
            self._hit(self._entry_of[key])
        return len(found)

    def pin(self, keys: Iterable[bytes], max_share: float = 0.25) -> list[int]:
        """Keeps the slots of the longest found prefix of `keys` until `unpin`. Returns them.

        At most `max_share` of all slots, and none that the next plan stores: ranks may read them after the plans so far. One
        slot stays that is neither pinned nor reserved, for what the next plan evicts from the device.
        """
        most = min(max_share * self.num_slots, self.num_slots - len(self._reserved) - 1)
        slots: list[int] = []
        for key in keys:
            entry = self._entry_of.get(key)
            if entry is None or self._pending.uses(self._table.slot_of(entry)):
                break
            if entry not in self._pins and len(self._pins) + 1 > most:
                break
            self._pins[entry] += 1
            self._hit(entry)
            slots.append(self._table.slot_of(entry))
        return slots

    def evictable(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns those of `keys` whose slots `reserve` may take: slots of pending copies stay."""
        found = (key for key in keys if key in self)
        return [key for key in found if not self._pending.uses(self._table.slot_of(self._entry_of[key]))]

    def unpin(self, slots: Iterable[int]) -> None:
        """Ends a `pin`. No rank may still read the slots."""
        for slot in slots:
            entry = self._table.entry_at(slot)
            self._pins[entry] -= 1
            if not self._pins[entry]:
                del self._pins[entry]
                self._touch(entry)

    def num_own(self, slots: Iterable[int]) -> int:
        """Returns how many of `slots` precede the first one with a page from elsewhere, which the tier alone would lack."""
        return sum(1 for _ in takewhile(lambda slot: slot not in self._filled, slots))

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to device pages, which no step may read before the copies of the next plan."""
        for slot, page in zip(slots, pages, strict=True):
            entry = self._table.entry_at(slot)
            self._pending.load(page, slot)
            self._filled.discard(slot)
            self._hit(entry)
        self.counters.loaded += len(slots)

    def decline(self, num_pages: int) -> None:
        """Records that a prompt computes pages that it could load."""
        self.counters.declined += num_pages
        self._loads = self._loads.declined()

    def load_s(self, num_pages: int) -> float | None:
        """Returns the expected seconds to load pages, if measured."""
        times = self._loads.times()
        return None if times is None else times.predict(num_pages)

    @property
    def page_s(self) -> float | None:
        """Seconds to load a page, the mean of measured loads."""
        return self._loads.mean_page_s

    @property
    def has_loads(self) -> bool:
        """Whether the next plan loads anything."""
        return bool(self._pending.loading)

    def is_loading(self, pages: Iterable[int]) -> bool:
        """Returns whether the next plan loads one of these device pages."""
        return bool(self._pending.loading) and not self._pending.loading.isdisjoint(pages)

    def is_copying(self, pages: Iterable[int]) -> bool:
        """Returns whether the next plan reads or writes one of these device pages in its copies."""
        return bool(self._pending.pages) and not self._pending.pages.isdisjoint(pages)

    def cancel(self, pages: Iterable[int]) -> list[bytes]:
        """Drops the stores of device pages that are written before the next plan. Returns the keys that lose their slot.

        No load is pending then: a plan follows each load at once.
        """
        lost = [key for key, slot in self._pending.cancel(pages).items() if self.match([key]) == [slot]]
        for key in lost:
            self._drop(self._entry_of[key])
        return lost

    @property
    def num_reservable(self) -> int:
        """How many slots `reserve` returns at most: pinned ones stay."""
        return min(self.num_slots // 2, self.num_slots - len(self._pins)) - len(self._reserved)

    def reserve(self, count: int) -> tuple[list[int], list[bytes]]:
        """Reserves up to `count` slots that no pending copy uses, at most half of all.

        Returns them, and the keys that lost their slots.
        """
        slots: list[int] = []
        dropped: list[bytes] = []
        while len(slots) < count and self.num_reservable > 0:
            if not self._table.num_free:
                if len(self._pins) == len(self._entry_of) or self._pending.uses(self._table.slot_of(self._policy.victim())):
                    break
                dropped.append(self._evict())
            if self._pending.uses(self._table.next_free):
                break
            slots.append(self._table.take())
            self._reserved.add(slots[-1])
        return slots, dropped

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """Ends the reservation of `slots`, of which the first have the pages of `keys`. Returns the keys that are new."""
        self._reserved.difference_update(slots)
        new = []
        for slot, key in zip_longest(slots, keys):
            if key is None or key in self._entry_of:
                self._table.free(slot)
                continue
            self._insert(slot, key)
            self._hit(self._entry_of[key])  # a request waits for it
            self._filled.add(slot)
            new.append(key)
        return new

    def want(self, num_slots: int, why: str) -> None:
        """Lets the next plans bring the tier to this size, within floor and limit."""
        self._wanted_slots = min(max(num_slots, self.rules.floor), self.rules.limit)
        self.sized_why = why

    def resize(self) -> tuple[HostResize | None, list[bytes]]:
        """Returns the next step to the wanted number of slots, and the keys that lose theirs; no copy is pending."""
        assert not self._pending, "copies of another plan use slots that may move"
        self._decide()
        missing = self._wanted_slots - self.num_slots
        if not missing:
            return None, []
        if missing > 0:
            self._table.grow(self.num_slots + min(missing, RESIZE_SLOTS))
            self.counters.resized += 1
            return HostResize(self.num_slots), []
        needed = max(1 + max(self._reserved, default=-1), 2 * len(self._reserved))
        if self._pins:
            return None, []
        return self._shrink(max(self._wanted_slots, self.num_slots - RESIZE_SLOTS, needed))

    def take(self) -> tuple[list[HostCopy], list[bytes]]:
        """Removes and returns the copies of the next plan, in order, and the keys of the stored pages."""
        taken = self._pending.take()
        return [copy for copy, _ in taken], [key for (is_load, _, _), key in taken if not is_load] if self._has_disk else []

    def learn(self, num_pages: int, seconds: float) -> None:
        """Records the measured time of a load."""
        self._loads = self._loads.after(num_pages, seconds)

    def check(self) -> list[str]:
        """Returns errors of slots and keys."""
        errors = [f"entry {entry} has another key" for key, entry in self._entry_of.items() if self._keys[entry] != key]
        return errors + self._table.errors(list(self._entry_of.values()), len(self._reserved))

    def _decide(self) -> None:
        if self._follows is not None:
            pages = self._follows
            self.want(self.rules.limit * pages.num_slots // max(1, pages.rules.limit), pages.sized_why)
            return
        if not self.rules.is_adaptive or self.hits.total_lookups - self._decided_at < self.rules.period:
            return
        self._decided_at = self.hits.total_lookups
        decision = choose_size(self.hits.hit_rates, self.num_slots, self.rules)
        if decision is not None:
            self.want(decision.num_pages, decision.why)
        else:
            self._wanted_slots = self.num_slots

    def _shrink(self, num_slots: int) -> tuple[HostResize | None, list[bytes]]:
        if num_slots >= self.num_slots:
            return None, []
        dropped = []
        while len(self._entry_of) + len(self._reserved) > num_slots:
            dropped.append(self._evict())
        moves = self._table.shrink(num_slots)
        for source, target in moves:
            if source in self._filled:
                self._filled.remove(source)
                self._filled.add(target)
        self.counters.resized += 1
        self.counters.moved += len(moves)
        return HostResize(num_slots, moves), dropped

    def _insert(self, slot: int, key: bytes) -> None:
        entry = self._table.assign(slot)
        self._entry_of[key], self._keys[entry] = entry, key
        self._stored_s[entry] = self.now_s
        self._policy.on_insert(entry, int.from_bytes(key[:8], "little"))
        self._touch(entry)

    def _hit(self, entry: int) -> None:
        self._idle[entry] = 0
        self._policy.on_hit(entry)
        self._touch(entry)

    def _touch(self, entry: int) -> None:
        if entry in self._pins:
            return
        self._time += 1
        self._idle[entry] = 1
        self._policy.on_release(entry, self._time)
        self._policy.on_idle(entry)

    def _evict(self) -> bytes:
        entry = self._policy.victim()
        key = self._keys[entry]
        assert key is not None, "a victim has a key"
        self.counters.evicted += 1
        self.counters.evicted_page_s += self.now_s - self._stored_s[entry]
        if not self._has_disk:  # a disk still gets the page, whose store comes before the next one into the slot
            self._pending.drop_at(self._table.slot_of(entry))
        self._drop(entry)
        return key

    def _drop(self, entry: int) -> None:
        key = self._keys[entry]
        assert key is not None, "only used entries are dropped"
        self._idle[entry] = 0
        self._policy.on_remove(entry)
        del self._entry_of[key]
        self._keys[entry] = None
        self._filled.discard(self._table.release(entry))
