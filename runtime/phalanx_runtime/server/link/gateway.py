"""Interface of the engine client to links."""

from collections.abc import Callable, Iterable
from typing import Protocol

from phalanx_api import wire
from phalanx_runtime.engine.load_feed import EngineObserver
from phalanx_runtime.engine.move_relay import MoveRelay
from phalanx_runtime.engine.open_requests import RequestSink


class EngineGateway(Protocol):
    """The engine client, on the event loop. No call blocks.

    Aborts and new incarnations drop requests without calls to their sinks.
    """

    @property
    def moves(self) -> MoveRelay:
        """Relay of move frames."""
        ...

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        """Returns the engine handle. `sink` is called later, never within this call. Raises BackendError.

        `move`: id of the move with the transferred pages to start on.
        """
        ...

    def abort(self, handles: list[int]) -> None:
        """Aborts requests; unknown handles are ignored."""
        ...

    def has(self, handle: int) -> bool:
        """Whether a request is open. A move ends it without a frame."""
        ...

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        """Changes the sink of requests."""
        ...

    def state(self) -> wire.State:
        """Whether the group serves."""
        ...

    def load(self) -> wire.Load:
        """Latest load report."""
        ...

    def pages(self) -> wire.PageChanges:
        """Page keys."""
        ...

    def assets(self) -> wire.Assets:
        """Model assets. Raises BackendError before an incarnation serves."""
        ...

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Subscribes to `state`. Returns a function that unsubscribes."""
        ...

    def observe(self, observer: EngineObserver) -> Callable[[], None]:
        """Subscribes to load and pages. Returns a function that unsubscribes."""
        ...


class DeclaredAdapters(Protocol):
    """Loads the service's adapters on the order of routers. Implemented in `engine.adapters.on_demand`. No call blocks."""

    def declare(self, frame: wire.DeclareAdapters) -> None:
        """Replaces the list."""
        ...

    def require(self, name: str, content_hash: str) -> None:
        """Starts to load an adapter of the list, as `wire.RequireAdapter` asks."""
        ...
