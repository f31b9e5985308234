"""Waiting requests in the policy's order: a heap per lane. Reading the first costs O(lanes), a change O(log n)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from phalanx_api.cost import attended
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy

# Totals over waiting requests: tokens, pages, the longest wait; updated with every change. The number of cached tokens of a
# request changes
# while it waits: `looked` updates it, and `next` returns requests by the age of their last update.


@dataclass(slots=True, kw_only=True)
class _Weight:
    """The counted values of one request."""

    request: Request
    tokens: int
    outstanding: int
    missing: int
    pages: int
    since_s: float


class QueueTotals:
    """Totals over waiting requests, each counted until it is dropped."""

    def __init__(self, page_size: int) -> None:
        self.tokens = 0
        """All their tokens, cached or not."""
        self.outstanding = 0
        """Uncomputed tokens and output tokens still allowed."""
        self.missing = 0
        """Tokens to compute before their first output token, without those cached at the last update."""
        self.attended = 0.0
        """Sum of the contexts of the tokens to compute."""
        self.pages = 0
        """Free pages that they will need, as of the last update."""
        self._page_size = page_size
        self._weights: dict[int, _Weight] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def oldest_s(self, now: float) -> float:
        """Returns the longest wait; 0 without requests."""
        return now - min((weight.since_s for weight in self._weights.values()), default=now)

    def add(self, request: Request) -> None:
        """Counts a request as if no token of it were cached."""
        tokens = len(request.tokens)
        pages = -(-tokens // self._page_size)
        weight = _Weight(
            request=request,
            tokens=tokens,
            outstanding=request.outstanding_tokens,
            missing=request.missing,
            pages=pages,
            since_s=request.waits_since_s,
        )
        self._weights[request.order] = weight
        self._weigh(weight, 1)

    def drop(self, request: Request) -> None:
        """Removes a request from the totals."""
        self._weigh(self._weights.pop(request.order), -1)

    def looked(self, request: Request, missing: int, pages: int) -> None:
        """Updates a request by its cached tokens. It becomes the last of `next`."""
        weight = self._weights.pop(request.order)
        self._weigh(weight, -1)
        weight.missing, weight.pages = missing, pages
        self._weights[request.order] = weight
        self._weigh(weight, 1)

    def next(self) -> Iterator[Request]:
        """Yields all requests, the least recently updated first."""
        return iter([weight.request for weight in self._weights.values()])

    def _weigh(self, weight: _Weight, change: int) -> None:
        self.tokens += change * weight.tokens
        self.outstanding += change * weight.outstanding
        self.missing += change * weight.missing
        self.attended += change * attended(weight.tokens, weight.tokens - weight.missing)
        self.pages += change * weight.pages


Entry = tuple[float, tuple[float, int], Request]
"""Key and seniority of a request when it was pushed. All seniorities differ, so requests are never compared."""


class Queue:
    """Waiting requests. Aborted ones stay in their heap, uncounted, until they are first or outnumber the others.

    Held requests wait in no lane until `release`.
    """

    def __init__(self, policy: Policy, page_size: int) -> None:
        self.waiting = QueueTotals(page_size)
        """Totals, held requests included."""
        self._policy = policy
        self._lanes: dict[str, list[Entry]] = {}
        self._counts: dict[str, int] = {}
        self._held: dict[int, Request] = {}
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def num_ready(self) -> int:
        """Number of requests that are not held."""
        return len(self.waiting) - len(self._held)

    def lanes(self) -> list[str]:
        """Lanes with requests that are not held."""
        return list(self._counts)

    def hold(self, request: Request) -> None:
        """Adds a request that must not be served yet."""
        self._held[request.handle] = request
        self.waiting.add(request)

    def release(self, handle: int) -> Request | None:
        """Removes and returns a held request, if it exists; the caller pushes it."""
        request = self._held.pop(handle, None)
        if request is not None:
            self.waiting.drop(request)
        return request

    def push(self, request: Request, now: float) -> None:
        """Adds a request at its place in the policy's order."""
        lane = self._policy.lane(request)
        heappush(self._lanes.setdefault(lane, []), (self._policy.key(request, now), request.seniority, request))
        self._count(request, 1)

    def first(self, now: float) -> Request | None:
        """Returns the request to serve first, without removing it."""
        if not self._counts:
            return None
        lane = min(self._counts, key=self._policy.rank) if len(self._counts) > 1 else next(iter(self._counts))
        return self._top(self._lanes[lane], now)

    def pop(self, request: Request) -> None:
        """Removes the request that `first` returned."""
        heap = self._lanes[self._policy.lane(request)]
        assert heap[0][2] is request, "only the first leaves the queue"
        heappop(heap)
        self._count(request, -1)

    def forget(self, request: Request) -> None:
        """Removes an aborted request from the totals."""
        if self.release(request.handle) is not None:
            return
        self._count(request, -1)
        self._num_gone += 1
        if self._num_gone > len(self) + 64:
            self._sweep()

    def sort(self, now: float) -> None:
        """Recomputes the keys of all requests."""
        self._sweep()
        for heap in self._lanes.values():
            heap[:] = [(self._policy.key(request, now), order, request) for _, order, request in heap]
            heapify(heap)

    def _top(self, heap: list[Entry], now: float) -> Request:
        """Returns the first request of a non-empty lane after updating keys that have grown."""
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
        """Rebuilds the heaps without aborted requests."""
        self._num_gone = 0
        for lane, heap in list(self._lanes.items()):
            heap[:] = [entry for entry in heap if not entry[2].gone]
            heapify(heap)
            if not heap:
                del self._lanes[lane]
