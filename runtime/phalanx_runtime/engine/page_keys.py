"""Page keys in the prefix cache of one incarnation, assembled from the engine's page changes.

The HTTP process stores them, so that new links cost the engine no work. A parent key precedes its children.
"""

from phalanx_api import wire


class PageKeys:
    """All keys since the start of an incarnation."""

    __slots__ = ("_keys", "_next")

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._next = 0

    def apply(self, changes: wire.PageChanges) -> None:
        """Applies the next changes; they have no gaps, and a snapshot replaces them when they are too many."""
        if changes.is_snapshot:
            self._keys = {key: None for _, key in changes.changes}
            self._next = changes.first
            return
        self._next = changes.first + len(changes.changes)
        for is_added, key in changes.changes:
            if is_added:
                self._keys[key] = None
            else:
                self._keys.pop(key, None)

    def snapshot(self) -> wire.PageChanges:
        """All current keys, with the number of the next change."""
        return wire.PageChanges(self._next, [(True, key) for key in self._keys], is_snapshot=True)
