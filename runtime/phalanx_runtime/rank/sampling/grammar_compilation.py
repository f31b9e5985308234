"""Compiles grammars in threads of the sampling rank, for its own engine or by order of rank 0."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from weakref import finalize

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.step_plan import CompileOrder, CompileResult
from phalanx_runtime.rank.sampling.grammar import Compiler, GrammarCache

log = logging.getLogger(__name__)

THREADS = 2
"""A second grammar compiles while the first takes seconds."""


class ThreadedGrammars:
    """Compiles in this process. Implements `engine.ports.GrammarCompiler`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def find(self, grammar: wire.Grammar) -> object | None:
        """Returns the compiled grammar, if kept."""
        return self._compiler.find(grammar)

    def compile(self, grammar: wire.Grammar) -> Future[object]:
        """Compiles in a thread."""
        return self._threads.submit(self._compiler.compile, grammar)

    def close(self) -> None:
        """Cancels queued compilations."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Ticket:
    """Keeps a grammar on the sampling rank while referenced."""

    __slots__ = ("__weakref__",)


class RemoteGrammars:
    """Orders compilation on the sampling rank, for rank 0. Implements `engine.ports.GrammarCompiler`."""

    def __init__(self, send: Callable[[CompileOrder], None]) -> None:
        self._send = send
        self._numbers = count()
        self._pending: dict[int, tuple[wire.Grammar, Future[object]]] = {}
        self._tickets: GrammarCache[_Ticket] = GrammarCache()
        self._dropped: deque[int] = deque()

    def find(self, grammar: wire.Grammar) -> object | None:
        """Returns a ticket, if kept."""
        return self._tickets.get(grammar)

    def compile(self, grammar: wire.Grammar) -> Future[object]:
        """Sends an order; the future cannot be cancelled. Raises PeerLost."""
        number, future = next(self._numbers), Future[object]()
        future.set_running_or_notify_cancel()
        self._pending[number] = (grammar, future)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._send(CompileOrder(number, grammar, dropped))
        return future

    def complete(self, result: CompileResult) -> None:
        """Completes the future; thread-safe."""
        grammar, future = self._pending.pop(result.number)
        if result.why:
            future.set_exception(RuntimeError(result.why) if result.is_bug else GrammarError(result.why))
            return
        ticket = _Ticket()
        finalize(ticket, self._dropped.append, result.number).atexit = False
        self._tickets.put(grammar, ticket)
        future.set_result(ticket)

    def close(self) -> None:
        """The sampling rank ends with the engine."""


class BothGrammars:
    """Compiles on the sampling rank and in this process, which drafts. Implements `engine.ports.GrammarCompiler`."""

    def __init__(self, remote: RemoteGrammars, local: ThreadedGrammars) -> None:
        self._remote = remote
        self._local = local

    def find(self, grammar: wire.Grammar) -> object | None:
        """Returns both, if kept."""
        both = self._remote.find(grammar), self._local.find(grammar)
        return None if None in both else both

    def compile(self, grammar: wire.Grammar) -> Future[object]:
        """Compiles both; the future cannot be cancelled. Raises PeerLost."""
        both = Future[object]()
        both.set_running_or_notify_cancel()
        remote, local = self._remote.compile(grammar), self._local.compile(grammar)
        remote.add_done_callback(lambda _: local.add_done_callback(lambda _: _complete(both, remote, local)))
        return both

    def close(self) -> None:
        """Cancels queued compilations."""
        self._remote.close()
        self._local.close()


def _complete(both: Future[object], remote: Future[object], local: Future[object]) -> None:
    if local.cancelled():
        return  # the engine ends
    error = remote.exception() or local.exception()
    if error is None:
        both.set_result((remote.result(), local.result()))
    else:
        both.set_exception(error)


class GrammarService:
    """Executes rank 0's orders on the sampling rank. `send`: thread-safe."""

    def __init__(self, compiler: Compiler, send: Callable[[CompileResult], None]) -> None:
        self._grammars = ThreadedGrammars(compiler)
        self._send = send
        self._held: dict[int, object] = {}
        self._closing, self._is_closed = threading.Lock(), False

    def execute(self, order: CompileOrder) -> None:
        """Starts compiling, unless kept."""
        for number in order.dropped:
            self._held.pop(number, None)
        if (kept := self._grammars.find(order.grammar)) is not None:
            self._hold(order.number, kept)
        else:
            self._grammars.compile(order.grammar).add_done_callback(partial(self._on_compiled, order.number))

    def close(self) -> None:
        """Sends no further results."""
        with self._closing:
            self._is_closed = True
        self._grammars.close()

    def _on_compiled(self, number: int, result: Future[object]) -> None:
        if result.cancelled():
            return
        error = result.exception()
        if error is None:
            self._hold(number, result.result())
            return
        if not isinstance(error, GrammarError):
            log.error("a grammar could not be compiled", exc_info=error)
        self._report(CompileResult(number, str(error) or type(error).__name__, not isinstance(error, GrammarError)))

    def _hold(self, number: int, compiled: object) -> None:
        self._held[number] = compiled
        self._report(CompileResult(number))

    def _report(self, result: CompileResult) -> None:
        with self._closing:
            if not self._is_closed:
                self._send(result)
