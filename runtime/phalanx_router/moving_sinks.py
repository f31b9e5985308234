"""Who hears of a request during a move: the stream with an ear for its first token, and nobody's request that warms a cache."""

from collections.abc import Callable

from phalanx_api import wire
from phalanx_router.sink import Sink


class FirstToken:
    """Gives all to another sink, and says once that the first token came. Implements `phalanx_router.sink.Sink`."""

    def __init__(self, sink: Sink, began: Callable[[int], None]) -> None:
        self.handle = 0
        self._sink = sink
        self._began = began

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """The first token; after it the other sink hears by itself."""
        self._sink.token(epoch, index, token, detail)
        self._began(self.handle)

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """For the other sink."""
        self._sink.prompt_told(told)

    def cached(self, found: wire.Cached) -> None:
        """For the other sink."""
        self._sink.cached(found)

    def finished(self, end: wire.Finished) -> None:
        """For the other sink."""
        self._sink.finished(end)

    def refused(self, refused: wire.Refused) -> None:
        """For the other sink."""
        self._sink.refused(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """For the other sink."""
        self._sink.lost(epoch, why, is_leave, cause)


class Warming:
    """Hears of a request that is computed for the prefix cache alone. Implements `phalanx_router.sink.Sink`."""

    def __init__(self, computed: Callable[[], None], refused: Callable[[str, str], None]) -> None:
        self._computed = computed
        self._refused = refused

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Nobody wants it."""

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """Nobody asked."""

    def cached(self, found: wire.Cached) -> None:
        """Nobody asked."""

    def finished(self, end: wire.Finished) -> None:
        """All of it is in pages."""
        self._computed()

    def refused(self, refused: wire.Refused) -> None:
        """The group does not compute it."""
        self._refused(refused.code, refused.message)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group is lost."""
        self._refused("target_lost", why)
