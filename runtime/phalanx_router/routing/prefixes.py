"""Index of the page keys in each group's prefix cache, from the groups' reports.

A page is usable only with all pages before it, so bisection over a prompt's keys counts its cached pages. If layers of a model
have a window, the last pages before the end are looked up: if all layers have one, these suffice, and else the group reports only
pages that have what such layers read. At least the last token is computed. Keys: `phalanx_api.prefix`.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, longest_hit, root_key

MAX_KEYS = 1 << 20
"""Per group, about 100 bytes each. Further keys are dropped, which underestimates hits."""


class KeySpace(NamedTuple):
    """Groups with equal values use equal keys for equal content."""

    page_model: str
    """Weights and KV dtype."""
    page_size: int


class PrefixIndex:
    """Page keys of each group."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.num_dropped = 0
        self._max_keys = max_keys
        self._cached: dict[str, set[bytes]] = {}
        self._spaces: dict[str, KeySpace] = {}
        self._hit_pages: dict[str, int] = {}

    @property
    def num_keys(self) -> int:
        """Number of keys of all groups."""
        return sum(map(len, self._cached.values()))

    def apply(self, group: str, space: KeySpace, changes: wire.PageChanges, hit_pages: int = 0) -> None:
        """Applies added and removed keys; a snapshot replaces all. hit_pages: `wire.Served.hit_pages`."""
        cached = self._cached.setdefault(group, set())
        self._spaces[group], self._hit_pages[group] = space, hit_pages
        if changes.is_snapshot:
            cached.clear()
        for is_added, key in changes.changes:
            if not is_added:
                cached.discard(key)
            elif len(cached) < self._max_keys:
                cached.add(key)
            else:
                self.num_dropped += 1

    def forget(self, group: str) -> None:
        """Removes a group."""
        self._cached.pop(group, None)
        self._spaces.pop(group, None)
        self._hit_pages.pop(group, None)

    def holders(self, key: bytes) -> list[str]:
        """Groups that have the page `key` and therefore, without windows, all pages before it."""
        return [group for group, cached in self._cached.items() if key in cached]

    def hits(self, prompt: "PromptKeys") -> dict[str, int]:
        """Cached prompt tokens of each group with a hit."""
        hits = {}
        for group, cached in self._cached.items():
            if cached:
                space = self._spaces[group]
                hit_pages, keys = self._hit_pages[group], prompt.keys(space)
                count = min(len(keys), (prompt.num_tokens - 1) // space.page_size)
                pages = _count_windowed(cached, keys, count, hit_pages) if hit_pages else _count_cached(cached, keys)
                if pages:
                    hits[group] = pages * space.page_size
        return hits


class PromptKeys:
    """Page keys of one prompt, hashed once per key space."""

    __slots__ = ("_by_space", "_cache_salt", "_tenant", "_tokens")

    def __init__(self, tokens: Sequence[int], tenant: str, cache_salt: str) -> None:
        self._tokens = tokens
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._by_space: dict[KeySpace, Sequence[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._tokens)

    def keys(self, space: KeySpace) -> Sequence[bytes]:
        """Keys of the full pages, in order."""
        keys = self._by_space.get(space)
        if keys is None:
            root = root_key(space.page_model, "", self._tenant, self._cache_salt)
            keys = self._by_space[space] = PrefixKeys(root, space.page_size).extend(self._tokens)
        return keys

    def blocks(self, secret: bytes) -> "PromptBlocks":
        """Numbers of the prompt's first full blocks by keys that are known already, of the first key space; empty without one.

        `secret`: without it nobody can test a guess of the prompt against them.
        """
        for space, keys in self._by_space.items():
            step = max(1, BLOCK_TOKENS // space.page_size)
            return PromptBlocks(step * space.page_size, [_block(key, secret) for key in keys[step - 1 :: step][:MAX_BLOCKS]])
        return PromptBlocks(BLOCK_TOKENS, [])


BLOCK_TOKENS = 64
"""Of `PromptKeys.blocks`, about: a multiple of the page size."""
MAX_BLOCKS = 128


class PromptBlocks(NamedTuple):
    """Blocks of a prompt: equal numbers are equal text, from the first token on."""

    block_tokens: int
    numbers: list[int]


def _block(key: bytes, secret: bytes) -> int:
    """A number for a key that is exact as a float."""
    return int.from_bytes(blake2b(key, key=secret[:64], digest_size=8).digest(), "big") >> 11


def _count_cached(cached: set[bytes], keys: Sequence[bytes]) -> int:
    if not keys or keys[0] not in cached:
        return 0
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in cached:
            low = middle
        else:
            high = middle - 1
    return low


class PageFeed:
    """Sequence check of one group's page changes on one connection."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: int | None = None  # unset before a snapshot

    def restart(self) -> None:
        """Starts a new incarnation, which counts from 0."""
        self._next = 0

    def check(self, changes: wire.PageChanges) -> Literal["apply", "resync", "drop"]:
        """ "apply" for the next change or a snapshot, "resync" (request a snapshot) at a gap, "drop" until it arrives."""
        if changes.is_snapshot:
            self._next = changes.first
            return "apply"
        if self._next is None:
            return "drop"
        if changes.first != self._next:
            self._next = None
            return "resync"
        self._next += len(changes.changes)
        return "apply"


def _count_windowed(cached: set[bytes], keys: Sequence[bytes], count: int, hit_pages: int) -> int:
    if cached.isdisjoint(keys):  # the usual miss, which the search below would take long to find
        return 0
    return longest_hit(lambda page: keys[page] in cached, count, hit_pages)
