"""Interfaces of the engine loop: to the ranks and to the HTTP process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from phalanx_api import wire
from phalanx_api.moves import MoveOut, PageAddress
from phalanx_runtime.core.migration.page_orders import Report
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult


class StepRunner(Protocol):
    """Runs step plans on all ranks of the group. Implemented in `phalanx_runtime.rank.runner`."""

    @property
    def pool(self) -> PoolShape:
        """Shape of the page pool, equal on every rank."""
        ...

    @property
    def depth(self) -> int:
        """Number of plans in flight at once: the number of pipeline stages."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Starts a plan; fewer than `depth` may be in flight. Raises errors.PeerLost when a rank is lost."""
        ...

    def finish(self) -> StepResult:
        """Result of the oldest plan in flight, after all ranks computed it. Raises errors.PeerLost."""
        ...


class StepWatcher(Protocol):
    """Observes the start and end of steps. Implemented by `phalanx_runtime.rank.process.heartbeat`."""

    def began(self, plan: StepPlan, expected_s: float | None) -> None:
        """A step starts. `expected_s`: predicted time, if known."""
        ...

    def ended(self, plan: StepPlan, wall_s: float) -> None:
        """A step ended after `wall_s`."""
        ...


class GrammarCompiler(Protocol):
    """Compiled grammars of the sampling rank. Implemented by `rank.sampling.grammar_threads`."""

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if any; steps can use it as long as a reference to it exists. Returns at once."""
        ...

    def begin(self, grammar: wire.Grammar) -> Future[object]:
        """Compiles a grammar, which takes up to seconds; any thread may complete the future.

        The future fails with GrammarError for an invalid grammar. Called by the engine's thread. Raises errors.PeerLost."""
        ...

    def close(self) -> None:
        """Stops compiling, without waiting for compilations in progress."""
        ...


class PageTransport(Protocol):
    """KV transfer of all ranks, concurrent with steps. Implemented by `phalanx_runtime.rank.transfer.carrier`.

    No call blocks. Orders to one rank are executed in order; `reports` returns their results.
    """

    @property
    def addresses(self) -> Sequence[PageAddress]:
        """Address where each rank receives pages. An empty host means the leader's pod."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called after each report, from any thread."""
        ...

    def expect(self, move: str, key: bytes, first: int, pages: list[int], step: int) -> None:
        """Lets every rank receive positions from `first` on into `pages`, once it has computed `step`. `key` authorises the
        sender.

        Rank 0 is ready on return; each other rank reports Expecting.
        """
        ...

    def forget(self, move: str) -> None:
        """Ends reception for this move; each rank reports Forgotten once it no longer writes."""
        ...

    def send(
        self, asked: MoveOut, first: int, pages: list[int], step: int, num_computed: int | None, num_drafted: int = 0
    ) -> None:
        """Lets every rank send positions from `first` on, stored in `pages`, once it has computed `step`.

        num_drafted: number of leading tokens for which all sent pages contain the draft model's KV.
        """
        ...

    def stop(self, move: str) -> None:
        """Ends sending for this move."""
        ...

    def reports(self) -> Sequence[tuple[int, Report]]:
        """Reports since the last call, each with its rank."""
        ...


class EngineChannel(Protocol):
    """Messages to and from the HTTP process. Implemented by `phalanx_runtime.engine.channel`."""

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """All pending messages; with `block`, waits for a message, `wake` or the timeout. None once the channel is closed."""
        ...

    def send(self, message: bytes) -> None:
        """Queues one message; never blocks."""
        ...

    def wake(self) -> None:
        """Ends a blocking `receive`, or the next one, without a message. Thread-safe, unlike the other methods."""
        ...
