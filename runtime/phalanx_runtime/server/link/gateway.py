"""Interface of the engine client to the leader's links."""

from collections.abc import Callable, Iterable
from typing import Protocol

from phalanx_api import wire
from phalanx_runtime.engine.client import EngineObserver
from phalanx_runtime.engine.move_relay import MoveRelay


class EngineSink(Protocol):
    """Receives the engine's frames about its requests, with the engine's handles. Called on the event loop; never blocks."""

    def tokens(self, frame: wire.Tokens) -> None:
        """All tokens of one step for this sink's requests. The sink owns the frame."""
        ...

    def refused(self, frame: wire.Refused) -> None:
        """One of this sink's requests was refused or ended without finishing."""
        ...


class EngineGateway(Protocol):
    """Engine client as links see it. No call blocks; all calls are made on the event loop.

    When the incarnation changes, all requests are dropped without a call to their sinks; the link notifies its router. An aborted
    request causes no further calls either.
    """

    @property
    def moves(self) -> MoveRelay:
        """Relay of move frames between links and engine."""
        ...

    def submit(self, request: wire.Request, sink: EngineSink, move: str = "") -> int:
        """Submits a request and returns its engine handle. `sink` is called later, never within this call.

        move: id of the move whose transferred pages the request starts on.
        """
        ...

    def abort(self, handles: list[int]) -> None:
        """Aborts requests; unknown handles are ignored."""
        ...

    def has(self, handle: int) -> bool:
        """Whether a request is still in the engine. A moved request leaves it without a frame."""
        ...

    def reassign(self, handles: Iterable[int], sink: EngineSink) -> None:
        """Assigns these requests to another sink."""
        ...

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        ...

    def load(self) -> wire.Load:
        """The last load report of the engine."""
        ...

    def pages(self) -> wire.PageChanges:
        """Snapshot of the page keys in the prefix cache."""
        ...

    def assets(self) -> wire.Assets:
        """Model assets for the API server. Raises BackendError until an incarnation has served."""
        ...

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`. Returns a function that ends the subscription."""
        ...

    def follow(self, follower: EngineObserver) -> Callable[[], None]:
        """Passes load reports and page changes to `follower`. Returns a function that ends the subscription."""
        ...
