"""What the prefix cache of one incarnation finds, put together from the engine's page changes: a snapshot for whoever asks.

The HTTP process keeps it, so that routers that come and go cost the engine nothing. Parents come before what follows them.
"""

from phalanx_api import wire


class PageKeys:
    """All keys, from the first change of an incarnation on."""

    __slots__ = ("_keys", "_next")

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._next = 0

    def apply(self, changes: wire.PageChanges) -> None:
        """Takes what the engine tells next: it leaves no gap, but gives a snapshot where changes were too many."""
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
        """Every key that is found now, and the number of the change to come."""
        return wire.PageChanges(self._next, [(True, key) for key in self._keys], is_snapshot=True)
