"""Which versions of each protocol this release speaks: its own, and that of the release before.

Two peers agree on the newest version that both speak; who finds none says so and lets go. Fields that are added (at the end of
arrays) with a default need no new version: who does not know them ignores them. A frame that is new, or a field that means
something else, does; it is sent only where the agreed version knows it. tests/protocol has the recorded frames of the version
before and compares.
"""

from dataclasses import dataclass

CLOSE_WRONG_VERSION = 4426
"""WebSocket close code: we have no version in common. The reason names both sides' versions."""
HTTP_WRONG_VERSION = 426
"""The same as an HTTP status."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The versions of one protocol that a program speaks: all from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def agreed(self, newest: int, oldest: int = 0) -> int | None:
        """The newest version that we and a peer speak; None when there is none. `oldest` 0: the peer speaks `newest` alone."""
        version = min(self.newest, newest)
        return version if version >= max(self.oldest, oldest or newest) else None


LINK = Spoken(1, 2)
"""Between routers and leaders (`wire`, `moves`). 2: `Hello` tells the oldest version too."""
SUMMARY = Spoken(1, 2)
"""Between the operator and routers (`summary`). 2: both tell versions, and routers the groups that they share none with."""
PEER = Spoken(1, 2)
"""Among the routers of a service. 2: the greeting tells versions."""
