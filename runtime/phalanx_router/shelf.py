"""Journals of streams that are not open here: closed ones of this router, and those of a router that was lost.

Each is kept for `keep_s`, packed; all together within `max_bytes`, beyond which the oldest go first. Pure: the clock is given.
"""

from collections.abc import Callable

from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import Copy

ENTRY_BYTES = 256
"""What a copy takes beside its packed bytes, about."""


class Shelf:
    """Copies of journals, by request id."""

    def __init__(self, clock: Callable[[], float], keep_s: float = 60.0, max_bytes: int = 64 << 20) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._packed: dict[str, tuple[float, bytes]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, copy: Copy) -> None:
        """Keeps a copy; the latest of a stream counts."""
        self.forget(copy.request.id)
        packed = peer_wire.encode(copy)
        self._packed[copy.request.id] = (self._clock() + self._keep_s, packed)
        self._num_bytes += ENTRY_BYTES + len(packed)
        self._bound()

    def get(self, id: str) -> Copy | None:
        """The copy of this stream; None when it was never here or is too old."""
        self._bound()
        entry = self._packed.get(id)
        return None if entry is None else peer_wire.decode_copy(entry[1])

    def forget(self, id: str) -> None:
        """Drops it, if it is there."""
        entry = self._packed.pop(id, None)
        if entry is not None:
            self._num_bytes -= ENTRY_BYTES + len(entry[1])

    def _bound(self) -> None:
        now = self._clock()
        while self._packed:
            id, (until, _) = next(iter(self._packed.items()))  # the oldest stands first
            if until > now and self._num_bytes <= self._max_bytes:
                return
            self.forget(id)
