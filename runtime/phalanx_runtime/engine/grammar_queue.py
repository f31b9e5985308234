"""Compiles grammars in the background: a large grammar delays its own request only."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.core.admission import Refusal
from phalanx_runtime.engine.ports import GrammarCompiler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    grammar: wire.Grammar
    result: Future[object]
    handles: list[int] = field(default_factory=list)


class GrammarQueue:
    """Grammars that requests wait for or hold, including preempted requests. A compiling thread calls `wake`."""

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._jobs: dict[wire.Grammar, _Job] = {}
        self._waiting: dict[int, _Job] = {}
        self._held: dict[int, object] = {}
        self._done: deque[_Job] = deque()

    def acquire(self, handle: int, grammar: wire.Grammar) -> bool:
        """Returns whether the grammar is compiled; else starts to compile it, once for equal grammars."""
        compiled = self._compiler.find(grammar)
        if compiled is not None:
            self._held[handle] = compiled
            return True
        job = self._jobs.get(grammar) or self._start(grammar)
        job.handles.append(handle)
        self._waiting[handle] = job
        return False

    def is_waiting(self, handle: int) -> bool:
        """Returns whether a request waits for its grammar."""
        return handle in self._waiting

    def prefetch(self, grammar: wire.Grammar) -> None:
        """Compiles a grammar before its request arrives."""
        if self._compiler.find(grammar) is None and grammar not in self._jobs:
            self._start(grammar)

    def take_ended(self) -> list[tuple[int, Refusal | None]]:
        """Requests with an ended compilation, each with its error, if any."""
        ended: list[tuple[int, Refusal | None]] = []
        while self._done:
            job = self._done.popleft()
            self._remove(job)
            refuse = _refusal(job) if job.handles else None
            for handle in job.handles:
                del self._waiting[handle]
                if refuse is None:
                    self._held[handle] = job.result.result()
                ended.append((handle, refuse))
        return ended

    def release(self, handle: int) -> None:
        """Releases the grammar of a request."""
        self._held.pop(handle, None)
        job = self._waiting.pop(handle, None)
        if job is not None:
            job.handles.remove(handle)
            if not job.handles and job.result.cancel():
                self._remove(job)

    def close(self) -> None:
        """Stops compiling."""
        self._compiler.close()

    def _start(self, grammar: wire.Grammar) -> _Job:
        job = self._jobs[grammar] = _Job(grammar, self._compiler.compile(grammar))
        job.result.add_done_callback(partial(self._complete, job))
        return job

    def _complete(self, job: _Job, result: Future[object]) -> None:
        self._done.append(job)
        self._wake()

    def _remove(self, job: _Job) -> None:
        if self._jobs.get(job.grammar) is job:
            del self._jobs[job.grammar]


def _refusal(job: _Job) -> Refusal | None:
    error = job.result.exception()
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return Refusal(400, "invalid_grammar", f"grammar: {error}")
    log.error("a grammar could not be compiled", exc_info=error)
    return Refusal(500, "internal_error", "the grammar could not be compiled; see the log of the engine")
