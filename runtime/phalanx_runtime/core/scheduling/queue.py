"""Requests that wait, in the order of the policy: a heap for each lane. A look at the first costs O(lanes), a change O(log n)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from phalanx_api.cost import attended
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy

# What the requests that wait come to: tokens, pages, the oldest of them. Kept as they come and go, so asking costs little.
# How many tokens of a request the cache spares changes while it waits: `looked` puts that right, and `next` says whose turn
# it is.


@dataclass(slots=True)
class _Weight:
    """What one request was counted for."""

    request: Request
    tokens: int
    outstanding: int
    missing: int
    pages: int
    since_s: float


class QueuedRequest:
    """Requests that wait, each counted until it is dropped."""

    def __init__(self, page_size: int) -> None:
        self.tokens = 0
        """All that they have, whatever the cache holds."""
        self.outstanding = 0
        """Tokens to compute and output tokens still allowed."""
        self.missing = 0
        """Tokens to compute before the first one can be drawn, less what the cache held when a request was last looked at."""
        self.attended = 0.0
        """The sum of the contexts of the tokens to compute."""
        self.pages = 0
        """Pages that they will take off the free ones, by the same look."""
        self._page_size = page_size
        self._weights: dict[int, _Weight] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def oldest_s(self, now: float) -> float:
        """For how long the one has waited that has waited longest; 0 when there is none."""
        return now - min((weight.since_s for weight in self._weights.values()), default=now)

    def add(self, request: Request) -> None:
        """Counts a request, as if the cache held nothing of it."""
        tokens = len(request.tokens)
        pages = -(-tokens // self._page_size)
        weight = _Weight(
            request,
            tokens,
            outstanding=request.outstanding_tokens,
            missing=request.missing,
            pages=pages,
            since_s=request.waits_since_s,
        )
        self._weights[request.order] = weight
        self._weigh(weight, 1)

    def drop(self, request: Request) -> None:
        """Uncounts a request."""
        self._weigh(self._weights.pop(request.order), -1)

    def looked(self, request: Request, missing: int, pages: int) -> None:
        """Counts a request by what the cache holds of it now. It is the last to have its turn again."""
        weight = self._weights.pop(request.order)
        self._weigh(weight, -1)
        weight.missing, weight.pages = missing, pages
        self._weights[request.order] = weight
        self._weigh(weight, 1)

    def next(self) -> Iterator[Request]:
        """All requests, the one whose last look is longest ago first."""
        return iter([weight.request for weight in self._weights.values()])

    def _weigh(self, weight: _Weight, change: int) -> None:
        self.tokens += change * weight.tokens
        self.outstanding += change * weight.outstanding
        self.missing += change * weight.missing
        self.attended += change * attended(weight.tokens, weight.tokens - weight.missing)
        self.pages += change * weight.pages


Entry = tuple[float, tuple[float, int], Request]
"""Key and seniority of a request when it was put there. No two have the same seniority, so requests are never compared."""


class Queue:
    """Waiting requests. Those that were aborted stay in their heap, uncounted, until they come up or outnumber the others.

    Those that are held wait like the others, but nobody is served before `release`: they are in no lane.
    """

    def __init__(self, policy: Policy, page_size: int) -> None:
        self.waiting = QueuedRequest(page_size)
        """What they come to, those that are held included."""
        self._policy = policy
        self._lanes: dict[str, list[Entry]] = {}
        self._counts: dict[str, int] = {}
        self._held: dict[int, Request] = {}
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def num_ready(self) -> int:
        """How many of them may be served."""
        return len(self.waiting) - len(self._held)

    def lanes(self) -> list[str]:
        """Lanes that have requests which may be served."""
        return list(self._counts)

    def hold(self, request: Request) -> None:
        """Lets a request wait that may not be served yet."""
        self._held[request.handle] = request
        self.waiting.add(request)

    def release(self, handle: int) -> Request | None:
        """Takes out a request that is held, to be pushed; None when there is no such."""
        request = self._held.pop(handle, None)
        if request is not None:
            self.waiting.drop(request)
        return request

    def push(self, request: Request, now: float) -> None:
        """Puts a request where the policy wants it."""
        lane = self._policy.lane(request)
        heappush(self._lanes.setdefault(lane, []), (self._policy.key(request, now), request.seniority, request))
        self._count(request, 1)

    def first(self, now: float) -> Request | None:
        """The request that is to be served first; it stays."""
        if not self._counts:
            return None
        lane = min(self._counts, key=self._policy.rank) if len(self._counts) > 1 else next(iter(self._counts))
        return self._top(self._lanes[lane], now)

    def pop(self, request: Request) -> None:
        """Takes out the request that `first` gave."""
        heap = self._lanes[self._policy.lane(request)]
        assert heap[0][2] is request, "only the first leaves the queue"
        heappop(heap)
        self._count(request, -1)

    def forget(self, request: Request) -> None:
        """Uncounts a request that is gone."""
        if self.release(request.handle) is not None:
            return
        self._count(request, -1)
        self._num_gone += 1
        if self._num_gone > len(self) + 64:
            self._sweep()

    def sort(self, now: float) -> None:
        """Takes the keys of all requests anew."""
        self._sweep()
        for heap in self._lanes.values():
            heap[:] = [(self._policy.key(request, now), order, request) for _, order, request in heap]
            heapify(heap)

    def _top(self, heap: list[Entry], now: float) -> Request:
        """The first of a lane that has one, after keys that have grown were put right."""
        while True:
            key, order, request = heap[0]
            if request.gone:
                heappop(heap)
                self._num_gone -= 1
                continue
            grown = self._policy.key(request, now)
            if grown <= key:
                return request
            heapreplace(heap, (grown, order, request))

    def _count(self, request: Request, change: int) -> None:
        lane = self._policy.lane(request)
        if change > 0:
            self.waiting.add(request)
        else:
            self.waiting.drop(request)
        self._counts[lane] = self._counts.get(lane, 0) + change
        if not self._counts[lane]:
            del self._counts[lane]
            if not self._lanes[lane]:
                del self._lanes[lane]

    def _sweep(self) -> None:
        """Rebuilds the heaps without those that are gone."""
        self._num_gone = 0
        for lane, heap in list(self._lanes.items()):
            heap[:] = [entry for entry in heap if not entry[2].gone]
            heapify(heap)
            if not heap:
                del self._lanes[lane]
