"""Index of the page keys in each group's prefix cache, from the groups' reports.

A page is usable only with all pages before it, so bisection over a prompt's keys counts its cached pages; with host memory, which
may lose a page before those that follow it, each key is looked up. If layers of a model have a window, the last pages before the
end are looked up: if all layers have one, these suffice, and else the group reports only pages that have what such layers read.
At least the last token is computed. Keys: `phalanx_api.prefix`.
"""

from collections.abc import Callable, Container, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, longest_hit, root_key

MAX_KEYS = 1 << 20
"""Per group, about 120 bytes each. With more, those that were added or found longest ago are dropped: hits are underestimated."""
DROPPED_SHARE = 16
"""A full index drops 1 of this number of its keys at once."""


class KeySpace(NamedTuple):
    """Groups with equal values use equal keys for equal content."""

    page_model: str
    """Weights and KV dtype."""
    page_size: int


class _CachedKeys:
    """Page keys of one group, those added first at the front."""

    __slots__ = ("_has_gaps", "_keys", "_max_keys", "_on_disk", "hit_pages", "num_dropped", "space")

    def __init__(self, space: KeySpace, max_keys: int) -> None:
        self.space = space
        self.hit_pages = 0
        self.num_dropped = 0
        self._max_keys = max_keys
        self._keys: dict[bytes, None] = {}
        self._on_disk: dict[bytes, None] = {}
        """Of pages that only the disk has; the group bounds their number."""
        self._has_gaps = False
        """Whether a page may be there without all pages before it."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def apply(self, changes: wire.PageChanges, *, has_gaps: bool) -> None:
        if changes.is_snapshot:
            self._keys.clear()
            self._on_disk.clear()
            self.num_dropped = 0
        on_disk = frozenset(changes.on_disk)
        for i, (is_added, key) in enumerate(changes.changes):
            self._on_disk.pop(key, None)
            if is_added:
                self._keys[key] = None
                if len(self._keys) > self._max_keys:
                    self._drop_oldest()
                continue
            self._keys.pop(key, None)
            if i in on_disk:
                self._on_disk[key] = None
        self._has_gaps = has_gaps or self.num_dropped > 0

    def num_hit(self, prompt: "PromptKeys") -> int:
        """Returns how many leading pages of a prompt are cached. If a drop is near, others are dropped first."""
        keys = prompt.keys(self.space)
        if self.hit_pages:
            count = min(len(keys), (prompt.num_tokens - 1) // self.space.page_size)
            return _count_windowed(self._keys.__contains__, keys, count, self.hit_pages)
        if self._has_gaps:
            num_pages = next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))
        else:
            num_pages = _count_chained(self._keys, keys)
        if 2 * len(self._keys) > self._max_keys:
            for key in reversed(keys[:num_pages]):
                if key in self._keys:  # a group may lack a page that bisection does not look up
                    del self._keys[key]
                    self._keys[key] = None
        return num_pages

    def num_hit_with_disk(self, prompt: "PromptKeys") -> int:
        """Returns how many leading pages of a prompt memory and disk have; 0 if nothing is only on disk."""
        if not self._on_disk:
            return 0
        keys = prompt.keys(self.space)
        count = min(len(keys), (prompt.num_tokens - 1) // self.space.page_size)
        if self.hit_pages:
            return _count_windowed(self._has, keys, count, self.hit_pages)
        return next((i for i in range(count) if not self._has(keys[i])), count)

    def _has(self, key: bytes) -> bool:
        return key in self._keys or key in self._on_disk

    def _drop_oldest(self) -> None:
        """Drops a share of the keys at once: finding the first key of a dictionary takes longer after each deletion."""
        oldest = list(islice(self._keys, max(1, self._max_keys // DROPPED_SHARE)))
        for key in oldest:
            del self._keys[key]
        self.num_dropped += len(oldest)


class PrefixIndex:
    """Page keys of each group."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._groups: dict[str, _CachedKeys] = {}

    @property
    def num_keys(self) -> int:
        """Number of keys of all groups."""
        return sum(map(len, self._groups.values()))

    @property
    def num_dropped(self) -> int:
        """Keys that were dropped since the groups' last snapshots."""
        return sum(cached.num_dropped for cached in self._groups.values())

    def apply(
        self, group: str, space: KeySpace, changes: wire.PageChanges, hit_pages: int = 0, *, has_gaps: bool = False
    ) -> None:
        """Applies added and removed keys; a snapshot replaces all.

        hit_pages: `wire.Served.hit_pages`. has_gaps: whether a page may be there without all pages before it, as in host memory.
        """
        cached = self._groups.setdefault(group, _CachedKeys(space, self._max_keys))
        cached.space, cached.hit_pages = space, hit_pages
        cached.apply(changes, has_gaps=has_gaps)

    def forget(self, group: str) -> None:
        """Removes a group."""
        self._groups.pop(group, None)

    def holders(self, key: bytes) -> list[str]:
        """Groups that have the page `key`, and therefore, without gaps and windows, all pages before it."""
        return [group for group, cached in self._groups.items() if key in cached]

    def hits(self, prompt: "PromptKeys") -> dict[str, int]:
        """Cached prompt tokens of each group with a hit."""
        hits = {}
        for group, cached in self._groups.items():
            if cached and (num_pages := cached.num_hit(prompt)):
                hits[group] = num_pages * cached.space.page_size
        return hits

    def hits_with_disk(self, prompt: "PromptKeys") -> dict[str, int]:
        """Prompt tokens of each group that has some pages only on disk: those in its memory and on disk."""
        hits = ((group, cached.num_hit_with_disk(prompt) * cached.space.page_size) for group, cached in self._groups.items())
        return {group: num_tokens for group, num_tokens in hits if num_tokens}


class PromptKeys:
    """Page keys of one prompt, hashed once per key space."""

    __slots__ = ("_adapter", "_by_space", "_cache_salt", "_marks", "_tenant", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        tenant: str,
        cache_salt: str,
        adapter: str = "",
        *,
        marks: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """`adapter`, `marks`: see `wire.Request.page_adapter` and `page_marks`."""
        self._tokens = tokens
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._adapter = adapter
        self._marks = marks
        self._by_space: dict[KeySpace, Sequence[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._tokens)

    def keys(self, space: KeySpace) -> Sequence[bytes]:
        """Keys of the full pages, in order."""
        keys = self._by_space.get(space)
        if keys is None:
            root = root_key(space.page_model, self._adapter, self._tenant, self._cache_salt)
            keys = self._by_space[space] = PrefixKeys(root, space.page_size, self._marks).extend(self._tokens)
        return keys

    def blocks(self, secret: bytes) -> "PromptBlocks":
        """Numbers of the prompt's first full blocks by keys that are known already, of the first key space; empty without one.

        `secret`: without it nobody can test a guess of the prompt against them.
        """
        for space, keys in self._by_space.items():
            step = max(1, BLOCK_TOKENS // space.page_size)
            return PromptBlocks(step * space.page_size, [_block(key, secret) for key in keys[step - 1 :: step][:MAX_BLOCKS]])
        return PromptBlocks(BLOCK_TOKENS, [])


def prompt_keys(request: wire.Request) -> PromptKeys:
    """Returns the page keys of a request's prompt."""
    return PromptKeys(request.prompt, request.tenant, request.cache_salt, request.page_adapter, marks=request.page_marks)


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


def _count_chained(cached: Container[bytes], keys: Sequence[bytes]) -> int:
    """Returns how many leading keys are cached, if each cached page has all before it."""
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


def _count_windowed(is_cached: Callable[[bytes], bool], keys: Sequence[bytes], count: int, hit_pages: int) -> int:
    if not any(map(is_cached, keys)):  # the usual miss, which the search below would take long to find
        return 0
    return longest_hit(lambda page: is_cached(keys[page]), count, hit_pages)
