"""Which groups hold how much of a prompt: the page keys that their prefix caches find, as they tell them.

    a page is found only if all pages before it are, so the keys of a prompt that a group holds are its first n:
    n by bisection, whatever the length of the prompt

Keys are `phalanx_api.prefix`'s: they name model hash, tenant, salt and all tokens up to the page's end, and differ between page
sizes. Per key and group about 100 bytes; a group that tells more than `MAX_KEYS` is remembered only so far, and counts for less.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key

MAX_KEYS = 1 << 20
"""Of one group: 16 million tokens in pages of 16."""


class KeySpace(NamedTuple):
    """Groups that name equal content by equal keys."""

    model_hash: str
    page_size: int


class PrefixIndex:
    """The keys of each group, by the group's key. `dropped` counts keys that found no room."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.dropped = 0
        self._max_keys = max_keys
        self._held: dict[str, set[bytes]] = {}
        self._spaces: dict[str, KeySpace] = {}

    @property
    def num_keys(self) -> int:
        """Keys of all groups."""
        return sum(map(len, self._held.values()))

    def apply(self, group: str, space: KeySpace, changes: wire.PageChanges) -> None:
        """Notes what a group finds now and did not before, and the reverse; a snapshot is all that it finds."""
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
        """Drops all of a group."""
        self._held.pop(group, None)
        self._spaces.pop(group, None)

    def holders(self, key: bytes) -> list[str]:
        """The groups that find this page, and so all before it."""
        return [group for group, held in self._held.items() if key in held]

    def hits(self, asked: "PromptKeys") -> dict[str, int]:
        """How many tokens of a prompt each group holds; only those that hold some."""
        found = {}
        for group, held in self._held.items():
            if held:
                space = self._spaces[group]
                pages = _first_missing(held, asked.keys(space))
                if pages:
                    found[group] = pages * space.page_size
        return found


class PromptKeys:
    """The keys of one prompt's full pages, hashed once for each key space, and only if some group holds anything."""

    __slots__ = ("_cache_salt", "_known", "_tenant", "_tokens")

    def __init__(self, tokens: Sequence[int], tenant: str, cache_salt: str) -> None:
        self._tokens = tokens
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._known: dict[KeySpace, Sequence[bytes]] = {}

    def keys(self, space: KeySpace) -> Sequence[bytes]:
        """The keys of its full pages, the first page's first."""
        known = self._known.get(space)
        if known is None:
            root = root_key(space.model_hash, "", self._tenant, self._cache_salt)
            known = self._known[space] = PrefixKeys(root, space.page_size).extend(self._tokens)
        return known


def _first_missing(held: set[bytes], keys: Sequence[bytes]) -> int:
    """How many of the first keys are held."""
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


# Whether what a group says of its pages follows what it said before: the numbers tell.
# nothing yet --snapshot--> next known --number is next--> next known                            next known --another
# number--> ask for a snapshot, and drop changes until it comes


class PageFeed:
    """One group's changes, as they come on one connection."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: int | None = None
        """Number of the change to come; None until a snapshot comes."""

    def restart(self) -> None:
        """A new incarnation: it begins without pages, at number 0."""
        self._next = 0

    def take(self, changes: wire.PageChanges) -> Literal["use", "ask", "drop"]:
        """What to do with these: they follow or are a snapshot, some are missing before them, or a snapshot is on its way."""
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
