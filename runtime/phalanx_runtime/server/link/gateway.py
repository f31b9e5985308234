"""What the leader's links need of the engine client, and what that tells them."""

from collections.abc import Callable, Iterable
from typing import Protocol

from phalanx_api import wire
from phalanx_runtime.engine.client import Follower
from phalanx_runtime.engine.move_relay import MoveRelay


class Sink(Protocol):
    """Takes what the engine says about requests, in frames with the engine's handles. Called on the event loop; never blocks."""

    def tokens(self, frame: wire.Tokens) -> None:
        """All tokens of one engine step that belong to this sink's requests. The frame is the sink's own from now on."""
        ...

    def refused(self, frame: wire.Refused) -> None:
        """One of this sink's requests does not run."""
        ...


class EngineGateway(Protocol):
    """What the link needs of the engine client. All calls return at once; all calls are made on the event loop.

    When the incarnation changes every request is forgotten: no sink hears of it again, and the link tells its router.
    A request that was aborted is not heard of again either.
    """

    @property
    def moves(self) -> MoveRelay:
        """Where frames of moves go, and come from."""
        ...

    def submit(self, request: wire.Request, sink: Sink, move: str = "") -> int:
        """The engine's handle of a request that was started; `sink` hears of it later, never within this call.

        With `move`, on the pages that came with that move.
        """
        ...

    def abort(self, handles: list[int]) -> None:
        """Forgets these requests; unknown handles are no error."""
        ...

    def has(self, handle: int) -> bool:
        """Whether a request is still in the engine: one that was moved has left it without a word."""
        ...

    def hand_over(self, handles: Iterable[int], sink: Sink) -> None:
        """Lets another sink hear of these requests from now on."""
        ...

    def state(self) -> wire.State:
        """Whether the group serves, and its incarnation."""
        ...

    def load(self) -> wire.Load:
        """What the engine last said it has in hand."""
        ...

    def pages(self) -> wire.PageChanges:
        """A snapshot of what the prefix cache finds."""
        ...

    def assets(self) -> wire.Assets:
        """What a door needs of the model. Raises BackendError while no incarnation has served yet."""
        ...

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change of `state`, until the function that this returns is called."""
        ...

    def follow(self, follower: Follower) -> Callable[[], None]:
        """Tells of load reports and pages, until the function that this returns is called."""
        ...
