"""The policy that would find most lately, by ghost caches of the others, with hysteresis.

A change of policy has no pause: the next policy learns a few cached pages with every call, while the current one still names
the victims; when it knows all pages it takes over. Order of use and hits go over; order of insertion begins anew.
"""

from array import array
from collections.abc import Callable, Mapping

from phalanx_runtime.core.kv.eviction.ghosts import Ghosts
from phalanx_runtime.core.kv.eviction.protocol import Eviction

PAGES_PER_CALL = 8
_MOST_HITS = 15


class Adaptive:
    """One of the given policies at a time, at first the first. `changes` are the names so far, that of now last."""

    def __init__(self, num_pages: int, idle: bytearray, policies: Mapping[str, Callable[[int, bytearray], Eviction]]) -> None:
        self._num_pages = num_pages
        self._idle = idle
        self._policies = policies
        self._ghosts = Ghosts(num_pages, policies)
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
