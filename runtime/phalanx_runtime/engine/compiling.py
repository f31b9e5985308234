"""Compiles grammars in the background, so that a large grammar delays its own request only.

Masks need compiled grammars. A grammar is compiled on the sampling rank before its request enters a step, and is held as long as
the request is in the engine, including preemptions.
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
from phalanx_runtime.engine.ports import GrammarCompiler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A grammar being compiled and the requests that wait for it."""

    grammar: wire.Grammar
    result: Future[object]
    handles: list[int] = field(default_factory=list)


class GrammarQueue:
    """Grammars that requests wait for or hold. Another thread calls `wake` when one is compiled."""

    def __init__(self, grammars: GrammarCompiler, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._jobs: dict[wire.Grammar, _Job] = {}
        self._waiting: dict[int, _Job] = {}
        self._held: dict[int, object] = {}
        self._done: deque[_Job] = deque()

    def begin(self, handle: int, grammar: wire.Grammar) -> bool:
        """Returns true if the grammar is compiled already; else compiles it. Equal grammars are compiled once."""
        kept = self._grammars.kept(grammar)
        if kept is not None:
            self._held[handle] = kept
            return True
        job = self._jobs.get(grammar) or self._start(grammar)
        job.handles.append(handle)
        self._waiting[handle] = job
        return False

    def warm(self, grammar: wire.Grammar) -> None:
        """Compiles the grammar of a request that a move will bring, so that the request does not wait for it."""
        if self._grammars.kept(grammar) is None and grammar not in self._jobs:
            self._start(grammar)

    def ended(self) -> list[tuple[int, Refuse | None]]:
        """Requests whose compilation has ended, each with its error if it failed."""
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
        """Releases the grammar of a request, compiled or not; a request without a grammar is ignored."""
        self._held.pop(handle, None)
        job = self._waiting.pop(handle, None)
        if job is not None:
            job.handles.remove(handle)
            if not job.handles and job.result.cancel():
                self._drop(job)

    def close(self) -> None:
        """Stops compiling, without waiting for compilations in progress."""
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
    """The error of a failed compilation, or None."""
    error = job.result.exception()
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return Refuse(400, "invalid_grammar", f"grammar: {error}")
    log.error("a grammar could not be compiled", exc_info=error)
    return Refuse(500, "internal_error", "the grammar could not be compiled; see the log of the engine")
