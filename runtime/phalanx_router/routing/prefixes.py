"""Index of the page keys in each group's prefix cache, as the groups report them.

A page is usable only if all pages before it are, so bisection over a prompt's keys finds how many of its pages a group holds.

Keys come from `phalanx_api.prefix`: they cover model hash, tenant, salt and all tokens up to the end of the page, and differ
between page sizes. Memory: about 100 bytes per key and group. Keys beyond `MAX_KEYS` of a group are dropped, which underestimates
its hits.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key

MAX_KEYS = 1 << 20
"""Per group: 16 million tokens in pages of 16."""


class KeySpace(NamedTuple):
    """Model hash and page size: groups that share both use equal keys for equal content."""

    model_hash: str
    page_size: int


class PrefixIndex:
    """Page keys of each group. `dropped` counts keys over the limit."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.dropped = 0
        self._max_keys = max_keys
        self._held: dict[str, set[bytes]] = {}
        self._spaces: dict[str, KeySpace] = {}

    @property
    def num_keys(self) -> int:
        """Number of keys of all groups."""
        return sum(map(len, self._held.values()))

    def apply(self, group: str, space: KeySpace, changes: wire.PageChanges) -> None:
        """Applies a group's added and removed keys; a snapshot replaces all of them."""
        held = self._held.setdefault(group, set())
        self._spaces[group] = space
        if changes.is_snapshot:
            held.clear()
        for is_added, key in changes.changes:
            if not is_added:
                held.discard(key)
            elif len(held) < self._max_keys:
                held.add(key)
            else:
                self.dropped += 1

    def forget(self, group: str) -> None:
        """Removes a group."""
        self._held.pop(group, None)
        self._spaces.pop(group, None)

    def holders(self, key: bytes) -> list[str]:
        """Returns the groups that hold the page `key`, and therefore all pages before it."""
        return [group for group, held in self._held.items() if key in held]

    def hits(self, asked: "PromptKeys") -> dict[str, int]:
        """Returns the number of prompt tokens that each group holds; groups without a hit are left out."""
        found = {}
        for group, held in self._held.items():
            if held:
                space = self._spaces[group]
                pages = _first_missing(held, asked.keys(space))
                if pages:
                    found[group] = pages * space.page_size
        return found


class PromptKeys:
    """Page keys of one prompt, hashed on first use, once per key space."""

    __slots__ = ("_cache_salt", "_known", "_tenant", "_tokens")

    def __init__(self, tokens: Sequence[int], tenant: str, cache_salt: str) -> None:
        self._tokens = tokens
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._known: dict[KeySpace, Sequence[bytes]] = {}

    def keys(self, space: KeySpace) -> Sequence[bytes]:
        """Returns the keys of the prompt's full pages in order."""
        known = self._known.get(space)
        if known is None:
            root = root_key(space.model_hash, "", self._tenant, self._cache_salt)
            known = self._known[space] = PrefixKeys(root, space.page_size).extend(self._tokens)
        return known


def _first_missing(held: set[bytes], keys: Sequence[bytes]) -> int:
    """Returns how many of the first `keys` are held."""
    if not keys or keys[0] not in held:
        return 0
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


# Sequence check of page changes: a gap in the numbers requests a snapshot, and changes are dropped until it arrives.


class PageFeed:
    """Sequence check of one group's page changes on one connection."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: int | None = None
        """Number of the next change; unset before a snapshot."""

    def restart(self) -> None:
        """Starts a new incarnation, which has no pages and counts from 0."""
        self._next = 0

    def take(self, changes: wire.PageChanges) -> Literal["use", "ask", "drop"]:
        """Returns "use" for the next change or a snapshot, "ask" (for a snapshot) at a gap, "drop" before the snapshot."""
        if changes.is_snapshot:
            self._next = changes.first
            return "use"
        if self._next is None:
            return "drop"
        if changes.first != self._next:
            self._next = None
            return "ask"
        self._next += len(changes.changes)
        return "use"
