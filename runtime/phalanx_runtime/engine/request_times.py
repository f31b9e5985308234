"""When requests arrived, and of traced ones when they were computed, until their first token here."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from phalanx_api import wire
from phalanx_api.trace import ChunkTime, PrefillTime


@dataclass(slots=True)
class _Times:
    submitted: float
    chunks: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, end, tokens."""


class RequestTimes:
    """Times are those of the engine loop's clock."""

    def __init__(self) -> None:
        self._arrived: dict[int, float] = {}
        """Of requests without a step."""
        self._times: dict[int, _Times] = {}
        """Of traced requests until their first token, and from a preemption until their next one."""
        self._traced: set[int] = set()

    @property
    def num_unstarted(self) -> int:
        """Requests without a step."""
        return len(self._arrived)

    @property
    def has_traced(self) -> bool:
        """Whether a traced request awaits its first token, or the next one after a preemption."""
        return bool(self._times)

    def submitted(self, handle: int, request: wire.Request, now: float) -> None:
        """Records the arrival of a request."""
        self._arrived[handle] = now
        if request.trace is not None:
            self._traced.add(handle)
            self._times[handle] = _Times(now)

    def preempted(self, handles: Iterable[int], now: float) -> None:
        """Records that requests lost their pages and wait again."""
        for handle in self._traced.intersection(handles):
            self._times.setdefault(handle, _Times(now))

    def started(self, handles: Iterable[int], now: float) -> list[float]:
        """Returns the queue times of those among `handles` that are in their first step."""
        arrivals = [self._arrived.pop(handle, None) for handle in handles]
        return [now - arrived for arrived in arrivals if arrived is not None]

    def computed(self, chunks: Iterable[tuple[int, int]], started: float, ended: float) -> None:
        """Records a step of traced requests. `chunks`: handle and tokens of each request in it."""
        for handle, count in chunks:
            times = self._times.get(handle)
            if times is not None:
                times.chunks.append((started, ended, count))

    def add_to(self, frame: wire.Tokens, now: float) -> None:
        """Adds the times of requests that have the awaited token, or their vector, in `frame`."""
        first = {*zip(frame.handles, frame.epochs, strict=True), *((end.handle, end.epoch) for end in frame.finished)}
        present = {cached.handle: position for position, cached in enumerate(frame.cached)}
        for handle, epoch in sorted(first):
            times = self._times.pop(handle, None)
            if times is None:
                continue
            chunks = [ChunkTime(now - started, now - ended, count) for started, ended, count in times.chunks]
            prefill = PrefillTime(now - times.submitted, chunks)
            if handle in present:
                frame.cached[present[handle]] = msgspec.structs.replace(frame.cached[present[handle]], prefill=prefill)
            else:
                frame.cached.append(wire.Cached(handle, epoch, 0, prefill))

    def forget(self, handle: int) -> None:
        """Drops a request that ended."""
        self._arrived.pop(handle, None)
        self._times.pop(handle, None)
        self._traced.discard(handle)
