"""Compiles the grammars of requests beside the steps, so that a large one holds up its own request only.

Steps draw with compiled grammars. Here each is made, by whoever draws, before its request is in a step, and held as long as the
request is in the engine, through preemptions too.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.admission import Refuse
from phalanx_runtime.engine.ports import Grammars

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A grammar that is being compiled, and the requests that wait for it."""

    grammar: wire.Grammar
    result: Future[object]
    handles: list[int] = field(default_factory=list)


class Compiling:
    """Grammars that requests wait for, and those that they hold. `wake` is called by another thread when one was compiled."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._jobs: dict[wire.Grammar, _Job] = {}
        self._waiting: dict[int, _Job] = {}
        self._held: dict[int, object] = {}
        self._done: deque[_Job] = deque()

    def begin(self, handle: int, grammar: wire.Grammar) -> bool:
        """Whether this request can be served at once. Else its grammar is compiled from now on; equal ones are compiled once."""
        kept = self._grammars.kept(grammar)
        if kept is not None:
            self._held[handle] = kept
            return True
        job = self._jobs.get(grammar) or self._start(grammar)
        job.handles.append(handle)
        self._waiting[handle] = job
        return False

    def warm(self, grammar: wire.Grammar) -> None:
        """Compiles a grammar whose request will come by a move, so that it need not wait then."""
        if self._grammars.kept(grammar) is None and grammar not in self._jobs:
            self._start(grammar)

    def ended(self) -> list[tuple[int, Refuse | None]]:
        """Requests that need wait no longer, in order of arrival for each grammar; with the reason why one cannot be served."""
        answers: list[tuple[int, Refuse | None]] = []
        while self._done:
            job = self._done.popleft()
            self._drop(job)
            refuse = _refusal(job) if job.handles else None
            for handle in job.handles:
                del self._waiting[handle]
                if refuse is None:
                    self._held[handle] = job.result.result()
                answers.append((handle, refuse))
        return answers

    def forget(self, handle: int) -> None:
        """Lets go of a request's grammar, compiled or not. A request without one is no error."""
        self._held.pop(handle, None)
        job = self._waiting.pop(handle, None)
        if job is not None:
            job.handles.remove(handle)
            if not job.handles and job.result.cancel():
                self._drop(job)

    def close(self) -> None:
        """Begins no more of them. Those that are being compiled are not waited for."""
        self._grammars.close()

    def _start(self, grammar: wire.Grammar) -> _Job:
        job = self._jobs[grammar] = _Job(grammar, self._grammars.begin(grammar))
        job.result.add_done_callback(partial(self._tell, job))
        return job

    def _tell(self, job: _Job, result: Future[object]) -> None:
        self._done.append(job)
        self._wake()

    def _drop(self, job: _Job) -> None:
        if self._jobs.get(job.grammar) is job:
            del self._jobs[job.grammar]


def _refusal(job: _Job) -> Refuse | None:
    """Why the grammar cannot be used, if it cannot."""
    error = job.result.exception()
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return Refuse(400, "invalid_grammar", f"grammar: {error}")
    log.error("a grammar could not be compiled", exc_info=error)
    return Refuse(500, "internal_error", "the grammar could not be compiled; the engine's log says more")
