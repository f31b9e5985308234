"""Which Submits of a router a report of the engine has seen, when router and engine count requests by handles of their own."""

from collections import deque


class SeenHandles:
    """The Submits of one link that no report has seen yet, in their order."""

    __slots__ = ("_highest", "_unseen")

    def __init__(self) -> None:
        self._highest = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """The engine's handle, or that of the Submit before when the engine never got one, and the router's."""

    def submitted(self, handle: int, engine_handle: int | None) -> None:
        """A Submit of the router went to the engine, or was refused before."""
        if engine_handle is None:
            engine_handle = self._unseen[-1][0] if self._unseen else 0
        self._unseen.append((engine_handle, handle))

    def lost(self) -> None:
        """The incarnation ended with all that was submitted."""
        while self._unseen:
            self._highest = max(self._highest, self._unseen.popleft()[1])

    def highest(self, last_handle: int) -> int:
        """The router's highest handle that a report has seen which has seen the engine's handles up to this one; 0 for none."""
        while self._unseen and self._unseen[0][0] <= last_handle:
            self._highest = max(self._highest, self._unseen.popleft()[1])
        return self._highest
