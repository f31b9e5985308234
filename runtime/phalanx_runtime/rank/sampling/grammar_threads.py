"""Grammars that are compiled beside the steps: in threads of the rank that draws, for its own engine or at rank 0's order."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Protocol
from weakref import finalize

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.step_plan import CompileOrder, CompileResult
from phalanx_runtime.rank.sampling.grammar import GrammarCache

log = logging.getLogger(__name__)

THREADS = 2
"""Grammars that are compiled at once: a second, so that one that takes seconds does not keep small ones waiting."""


class Compiler(Protocol):
    """Compiles grammars. Implemented by `phalanx_runtime.rank.sampling.grammar`; tests have fakes."""

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if there is one. Returns at once."""
        ...

    def compile(self, grammar: wire.Grammar) -> object:
        """The same, after it was compiled. Takes up to seconds; any thread may call it. Raises GrammarError, for the client."""
        ...


class ThreadedGrammars:
    """Grammars of this process. Implements `phalanx_runtime.engine.ports.Grammars`."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if there is one."""
        return self._compiler.kept(grammar)

    def begin(self, grammar: wire.Grammar) -> Future[object]:
        """What will be the compiled grammar, in a thread."""
        return self._threads.submit(self._compiler.compile, grammar)

    def close(self) -> None:
        """Begins no more of them. Those that are being compiled are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Ticket:
    """Stands for a grammar that the drawer holds as long as this object lives."""

    __slots__ = ("__weakref__",)


class RemoteGrammars:
    """Grammars of the drawer, at rank 0. `ask` takes orders to it, on the engine's thread; `hear` gets what it tells.

    Implements `phalanx_runtime.engine.ports.Grammars`.
    """

    def __init__(self, ask: Callable[[CompileOrder], None]) -> None:
        self._ask = ask
        self._numbers = count()
        self._asked: dict[int, tuple[wire.Grammar, Future[object]]] = {}
        self._kept: GrammarCache[_Ticket] = GrammarCache()
        self._dropped: deque[int] = deque()

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammar, if there is one."""
        return self._kept.get(grammar)

    def begin(self, grammar: wire.Grammar) -> Future[object]:
        """What will be the compiled grammar, once the drawer has it. Cannot be taken back. Raises PeerLost."""
        number, future = next(self._numbers), Future[object]()
        future.set_running_or_notify_cancel()
        self._asked[number] = (grammar, future)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._ask(CompileOrder(number, grammar, dropped))
        return future

    def hear(self, told: CompileResult) -> None:
        """Ends the wait for a grammar. Any thread may call it."""
        grammar, future = self._asked.pop(told.number)
        if told.why:
            future.set_exception(RuntimeError(told.why) if told.is_bug else GrammarError(told.why))
            return
        ticket = _Ticket()
        finalize(ticket, self._dropped.append, told.number).atexit = False
        self._kept.put(grammar, ticket)
        future.set_result(ticket)

    def close(self) -> None:
        """Nothing is to be done: the drawer ends with the engine."""


class BothGrammars:
    """Grammars of the drawer and of this process, which drafts: each is compiled in both before any step needs it.

    Implements `phalanx_runtime.engine.ports.Grammars`.
    """

    def __init__(self, far: RemoteGrammars, near: ThreadedGrammars) -> None:
        self._far = far
        self._near = near

    def kept(self, grammar: wire.Grammar) -> object | None:
        """The compiled grammars, if there are two."""
        both = self._far.kept(grammar), self._near.kept(grammar)
        return None if None in both else both

    def begin(self, grammar: wire.Grammar) -> Future[object]:
        """What will be the compiled grammars. Cannot be taken back. Raises PeerLost."""
        both = Future[object]()
        both.set_running_or_notify_cancel()
        far, near = self._far.begin(grammar), self._near.begin(grammar)
        far.add_done_callback(lambda _: near.add_done_callback(lambda _: _end(both, far, near)))
        return both

    def close(self) -> None:
        """Begins no more of them. Those that are being compiled are not waited for."""
        self._far.close()
        self._near.close()


def _end(both: Future[object], far: Future[object], near: Future[object]) -> None:
    """Tells what became of two that are done."""
    if near.cancelled():
        return  # the engine ends: nobody waits
    error = far.exception() or near.exception()
    if error is None:
        both.set_result((far.result(), near.result()))
    else:
        both.set_exception(error)


class GrammarService:
    """The drawer's part: obeys orders of rank 0 and holds what they ask for. `give` takes answers to rank 0, on any thread."""

    def __init__(self, compiler: Compiler | None, give: Callable[[CompileResult], None]) -> None:
        self._grammars = None if compiler is None else ThreadedGrammars(compiler)
        self._give = give
        self._held: dict[int, object] = {}
        self._closing, self._is_closed = threading.Lock(), False

    def obey(self, order: CompileOrder) -> None:
        """Begins to compile, unless it is there already. Returns at once."""
        for number in order.dropped:
            self._held.pop(number, None)
        if self._grammars is None:
            self._give(CompileResult(order.number, "this runtime was started without grammars"))
        elif (kept := self._grammars.kept(order.grammar)) is not None:
            self._hold(order.number, kept)
        else:
            self._grammars.begin(order.grammar).add_done_callback(partial(self._ended, order.number))

    def close(self) -> None:
        """Answers nothing more."""
        with self._closing:
            self._is_closed = True
        if self._grammars is not None:
            self._grammars.close()

    def _ended(self, number: int, result: Future[object]) -> None:
        if result.cancelled():
            return
        error = result.exception()
        if error is None:
            self._hold(number, result.result())
            return
        if not isinstance(error, GrammarError):
            log.error("a grammar could not be compiled", exc_info=error)
        self._tell(CompileResult(number, str(error) or type(error).__name__, not isinstance(error, GrammarError)))

    def _hold(self, number: int, compiled: object) -> None:
        self._held[number] = compiled
        self._tell(CompileResult(number))

    def _tell(self, told: CompileResult) -> None:
        with self._closing:
            if not self._is_closed:
                self._give(told)
