"""Index of the live pages on disk, with an eviction policy of the page pool."""

from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import make_eviction
from phalanx_runtime.rank.tiers.segment import StoredPage


class LivePages:
    """At most `capacity` pages by key. All are idle for the policy: nothing holds a page on disk, and chains are unknown."""

    def __init__(self, capacity: int, eviction: EvictionPolicy) -> None:
        self.capacity = capacity
        self._pages: dict[bytes, StoredPage] = {}
        self._by_number: list[StoredPage | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._idle = bytearray(capacity)
        self._num_uses = 0
        self._policy = make_eviction(eviction, capacity, self._idle)

    def __len__(self) -> int:
        return len(self._pages)

    def keys(self) -> list[bytes]:
        """Returns the keys, those added first at the front."""
        return list(self._pages)

    def get(self, key: bytes) -> StoredPage | None:
        """Returns a page, if it is live."""
        return self._pages.get(key)

    def add(self, page: StoredPage) -> None:
        """Adds a page with a new key, while there are fewer than `capacity`."""
        number = page.number = self._free.pop()
        self._pages[page.key] = self._by_number[number] = page
        page.segment.pages[page.key] = page
        self._policy.on_insert(number, int.from_bytes(page.key[:8], "little"))
        self._release(number)

    def touch(self, page: StoredPage) -> None:
        """Records a use."""
        self._idle[page.number] = 0
        self._policy.on_hit(page.number)
        self._release(page.number)

    def remove(self, page: StoredPage) -> None:
        """Removes a live page; its slot is dead."""
        number = page.number
        del self._pages[page.key], page.segment.pages[page.key]
        self._by_number[number] = None
        self._idle[number] = 0
        self._policy.on_remove(number)
        self._free.append(number)

    def move(self, page: StoredPage, target: StoredPage) -> None:
        """Lets a live page be where `target` is; its former slot is dead."""
        del page.segment.pages[page.key]
        page.segment, page.slot = target.segment, target.slot
        page.segment.pages[page.key] = page

    def victim(self) -> StoredPage | None:
        """Returns the page to remove before one is added, None while there is room."""
        if self._free:
            return None
        page = self._by_number[self._policy.victim()]
        assert page is not None, "the policy chooses among live pages"
        return page

    def _release(self, number: int) -> None:
        self._num_uses += 1
        self._policy.on_release(number, self._num_uses)
        self._idle[number] = 1
        self._policy.on_idle(number)
