"""Interfaces of the engine loop, and null objects."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from phalanx_api import wire
from phalanx_api.moves import MoveOut, PageAddress, SendPrefix
from phalanx_runtime.core.migration.page_orders import ExpectPages, FetchPages, PageCopy, Report
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult


class StepRunner(Protocol):
    """Runs step plans on all ranks. Implemented in `rank.runner`."""

    @property
    def pool(self) -> PoolShape:
        """Page pool, equal on every rank."""
        ...

    @property
    def depth(self) -> int:
        """The number of pipeline stages, each of which computes a plan at once."""
        ...

    def start(self, plan: StepPlan) -> None:
        """Starts a plan. At most `Limits.max_flights` are in flight.

        Raises PeerLost; StepOutOfMemory or RowStateLost if the plan did not start and may be repeated with fewer requests.
        """
        ...

    def finish(self) -> StepResult:
        """Result of the oldest plan, after all ranks computed it. Raises PeerLost."""
        ...


class StepWatcher(Protocol):
    """Observes steps. Implemented in `rank.process.heartbeat`."""

    def step_started(self, plan: StepPlan, expected_s: float | None) -> None:
        """`expected_s`: predicted time, if known."""
        ...

    def step_ended(self, plan: StepPlan, wall_s: float) -> None:
        """A step ended."""
        ...

    def step_failed(self, plan: StepPlan) -> None:
        """A step did not start: its time says nothing."""
        ...


class GrammarCompiler(Protocol):
    """Grammars of the sampling rank. Implemented in `rank.sampling`."""

    def find(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if any; steps can use it while a reference exists."""
        ...

    def compile(self, grammar: wire.Grammar) -> Future[object]:
        """Compiles in the background. Raises PeerLost.

        Any thread may complete the future, which fails with GrammarError for an invalid grammar.
        """
        ...

    def close(self) -> None:
        """Stops compiling."""
        ...


MAY_PASS = "for now: "
"""Start of the reason of a failed load that may succeed later, as it is not that the adapter does not fit."""


class AdapterLoader(Protocol):
    """Adapters of all ranks. Implemented in `rank.step.adapters`."""

    def load(self, slot: int, path: str, content_hash: str) -> str:
        """Loads an adapter into a slot that no request has, while no plan is in flight. Returns why not; empty on success.

        Raises PeerLost.
        """
        ...


class PageTransport(Protocol):
    """KV transfer of all ranks. Implemented in `rank.transfer`. No call blocks; each rank executes orders in sequence."""

    @property
    def addresses(self) -> Sequence[PageAddress]:
        """Address of each rank; an empty host is the leader's pod. Without addresses no moves are possible."""
        ...

    def start(self, wake: Callable[[], None]) -> None:
        """Calls `wake` after each report, from any thread."""
        ...

    def expect(self, order: ExpectPages) -> None:
        """Lets every rank receive. Rank 0 is ready on return; each other rank reports Expecting."""
        ...

    def forget(self, move: str) -> None:
        """Ends reception; each rank reports Forgotten once it no longer writes."""
        ...

    def send(self, order: MoveOut | SendPrefix, copy: PageCopy) -> None:
        """Lets every rank send this round, once its step is computed."""
        ...

    def stop(self, move: str) -> None:
        """Ends sending."""
        ...

    def fetch(self, order: FetchPages) -> None:
        """Lets every rank read pages from disk into slots of host memory, once the step is computed, and report PagesFetched."""
        ...

    def reports(self) -> Sequence[tuple[int, Report]]:
        """New reports, each with its rank."""
        ...


class EngineChannel(Protocol):
    """Messages to and from the HTTP process. Implemented in `engine.channel`."""

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        """All pending messages; `block` waits for a message, `wake` or the timeout. `None` once closed."""
        ...

    def send(self, message: bytes) -> None:
        """Queues a message; never blocks."""
        ...

    def wake(self) -> None:
        """Ends a blocking `receive`, or the next one. Thread-safe, unlike the others."""
        ...


class _NoWatcher:
    def step_started(self, plan: StepPlan, expected_s: float | None) -> None:
        pass

    def step_ended(self, plan: StepPlan, wall_s: float) -> None:
        pass

    def step_failed(self, plan: StepPlan) -> None:
        pass


class _NoGrammars:
    """For runners that ignore grammars."""

    def find(self, grammar: wire.Grammar) -> object | None:
        return grammar

    def compile(self, grammar: wire.Grammar) -> Future[object]:
        raise AssertionError("`find` returns every grammar")

    def close(self) -> None:
        pass


class _NoAdapters:
    def load(self, slot: int, path: str, content_hash: str) -> str:
        return "this engine loads no adapters"


class _NoTransport:
    addresses: Sequence[PageAddress] = ()

    def start(self, wake: Callable[[], None]) -> None:
        pass

    def expect(self, order: ExpectPages) -> None:
        pass

    def forget(self, move: str) -> None:
        pass

    def send(self, order: MoveOut | SendPrefix, copy: PageCopy) -> None:
        pass

    def stop(self, move: str) -> None:
        pass

    def fetch(self, order: FetchPages) -> None:
        pass

    def reports(self) -> Sequence[tuple[int, Report]]:
        return ()


NO_WATCHER: StepWatcher = _NoWatcher()
NO_ADAPTERS: AdapterLoader = _NoAdapters()
NO_GRAMMARS: GrammarCompiler = _NoGrammars()
NO_TRANSPORT: PageTransport = _NoTransport()
