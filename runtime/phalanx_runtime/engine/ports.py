"""The seams of the engine loop: the ranks below it, the HTTP process above it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from phalanx_api import wire
from phalanx_api.moves import MoveOut, PageAddress
from phalanx_runtime.core.migration.page_orders import Report
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult


class StepRunner(Protocol):
    """Runs step plans on all ranks of the group. Implemented by `phalanx_runtime.rank`; tests have fakes."""

    @property
    def pool(self) -> PoolShape:
        """The page pool that every rank made."""
        ...

    @property
    def depth(self) -> int:
        """How many plans it works on at once, at least 1: one in each stage of a pipeline."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Takes a plan while fewer than `depth` are in flight, and begins with it. Raises errors.PeerLost when a rank is gone."""
        ...

    def finish(self) -> StepResult:
        """The tokens drawn by the oldest plan in flight, after all ranks computed it. Raises errors.PeerLost."""
        ...


class Watch(Protocol):
    """Hears of every step. Implemented by `phalanx_runtime.rank.process.heartbeat`."""

    def began(self, plan: StepPlan, expected_s: float | None) -> None:
        """A step begins, which should take so long if that is known."""
        ...

    def ended(self, plan: StepPlan, wall_s: float) -> None:
        """It took so long."""
        ...


class Grammars(Protocol):
    """Compiled grammars, of the rank that draws. Implemented by `rank.sampling.grammar_threads`; tests have fakes."""

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if there is one: as long as somebody holds it, steps find it. Returns at once."""
        ...

    def begin(self, grammar: wire.Grammar) -> Future[object]:
        """The same, once it was compiled, which takes up to seconds. Returns at once; any thread ends the wait. Fails with
        GrammarError, for the client. Called by the engine's thread. Raises errors.PeerLost when a rank is gone."""
        ...

    def close(self) -> None:
        """Begins no more of them. Those that are being compiled are not waited for."""
        ...


class Carrier(Protocol):
    """The ranks as those who send and take pages, beside the steps. Implemented by `phalanx_runtime.rank.transfer.carrier`.

    No call waits. An order to one rank comes after those before it; `reports` tells what came of them.
    """

    @property
    def addresses(self) -> Sequence[PageAddress]:
        """Where each rank takes pages in. One without a host is in the leader's pod."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, from any thread, after each report."""
        ...

    def expect(self, move: str, key: bytes, first: int, pages: list[int], step: int) -> None:
        """Every rank takes positions from `first` on into these pages, from who knows the key, once it has computed the step.

        Rank 0 does so when this returns; each other one says Expecting then.
        """
        ...

    def forget(self, move: str) -> None:
        """No rank takes more for this move; each says Forgotten once it writes nothing."""
        ...

    def send(
        self, asked: MoveOut, first: int, pages: list[int], step: int, num_computed: int | None, num_drafted: int = 0
    ) -> None:
        """Every rank sends positions from `first` on, which lie in these pages, once it has computed the step.

        num_drafted: of so many of the first tokens all pages that were sent hold what a draft model computed.
        """
        ...

    def stop(self, move: str) -> None:
        """No rank sends more of this move."""
        ...

    def reports(self) -> Sequence[tuple[int, Report]]:
        """What the ranks told since the last call, each with its rank."""
        ...


class Channel(Protocol):
    """Messages to and from the HTTP process. Implemented by `phalanx_runtime.engine.channel`."""

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """All messages that are there; with `block`, waits for one, for `wake`, or so long. None once the channel is closed."""
        ...

    def send(self, message: bytes) -> None:
        """Queues one message; never waits."""
        ...

    def wake(self) -> None:
        """Ends a `receive` that blocks, or the next one, with no message. The only call that any thread may make."""
        ...
