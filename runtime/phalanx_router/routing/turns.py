"""Whose turn it is where groups are taken one after another: the number of the last request that went to each."""

MOST = 4096
"""Groups that are remembered. One that is forgotten is next."""


class Turns:
    """By the groups' keys. `last` is read by `choose.in_turn`."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self._count = 0

    def take(self, key: str) -> None:
        """Notes that this group got a request."""
        self._count += 1
        self.last.pop(key, None)
        self.last[key] = self._count  # the last one stands last
        if len(self.last) > MOST:
            del self.last[next(iter(self.last))]
