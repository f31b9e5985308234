"""Waiting requests in the policy's order: a heap per lane. The first takes O(lanes), a change O(log n)."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from phalanx_api.cost import attention_work
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy


@dataclass(slots=True, kw_only=True)
class _Counted:
    """Values of one request in the totals."""

    request: Request
    tokens: int
    outstanding: int
    uncomputed: int
    pages: int
    since_s: float


class QueueTotals:
    """Totals over waiting requests. Cached tokens change while a request waits: `update` follows."""

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        """max_pages: most pages that a request needs to start, if there is a bound."""
        self.tokens = 0
        """All tokens, cached or not."""
        self.outstanding = 0
        """Uncomputed tokens and output tokens still allowed."""
        self.uncomputed = 0
        """Tokens before the first output token, without cached ones."""
        self.attention = 0.0
        """Attention work of these tokens."""
        self.pages = 0
        """Free pages needed to start."""
        self._page_size = page_size
        self._max_pages = max_pages
        self._counted: dict[int, _Counted] = {}

    def __len__(self) -> int:
        return len(self._counted)

    def longest_wait_s(self, now: float) -> float:
        """Returns the longest wait; 0 without requests."""
        return now - min((counted.since_s for counted in self._counted.values()), default=now)

    def add(self, request: Request) -> None:
        """Adds a request without cached tokens."""
        num_tokens = len(request.tokens)
        num_pages = -(-num_tokens // self._page_size)
        counted = _Counted(
            request=request,
            tokens=num_tokens,
            outstanding=request.outstanding_tokens,
            uncomputed=request.num_uncomputed,
            pages=num_pages if self._max_pages is None else min(num_pages, self._max_pages),
            since_s=request.scheduling.waits_since_s,
        )
        self._counted[request.params.order] = counted
        self._apply(counted, 1)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        self._apply(self._counted.pop(request.params.order), -1)

    def update(self, request: Request, uncomputed: int, pages: int) -> None:
        """Updates a request, which becomes the last of `by_update`."""
        counted = self._counted.pop(request.params.order)
        self._apply(counted, -1)
        counted.uncomputed, counted.pages = uncomputed, pages
        self._counted[request.params.order] = counted
        self._apply(counted, 1)

    def by_update(self) -> Iterator[Request]:
        """Yields all requests, the least recently updated first."""
        return iter([counted.request for counted in self._counted.values()])

    def _apply(self, counted: _Counted, sign: int) -> None:
        self.tokens += sign * counted.tokens
        self.outstanding += sign * counted.outstanding
        self.uncomputed += sign * counted.uncomputed
        self.attention += sign * attention_work(counted.tokens, counted.tokens - counted.uncomputed)
        self.pages += sign * counted.pages


Entry = tuple[float, tuple[float, int], Request]
"""Key when pushed, and seniority, which is unique, so requests are never compared."""


class Queue:
    """Waiting requests; held ones are in no lane until `release`. Aborted ones remain in the heap, uncounted."""

    def __init__(self, policy: Policy, page_size: int, max_pages: int | None = None) -> None:
        self.totals = QueueTotals(page_size, max_pages)
        """Includes held requests."""
        self._policy = policy
        self._lanes: dict[str, list[Entry]] = {}
        self._counts: dict[str, int] = {}
        self._held: dict[int, Request] = {}
        self._num_aborted = 0

    def __len__(self) -> int:
        return len(self.totals)

    @property
    def num_ready(self) -> int:
        """Number of requests that are not held."""
        return len(self.totals) - len(self._held)

    def lanes(self) -> list[str]:
        """Returns the lanes with requests."""
        return list(self._counts)

    def hold(self, request: Request) -> None:
        """Adds a request that must not start yet."""
        self._held[request.params.handle] = request
        self.totals.add(request)

    def release(self, handle: int) -> Request | None:
        """Removes and returns a held request, if it exists."""
        request = self._held.pop(handle, None)
        if request is not None:
            self.totals.remove(request)
        return request

    def push(self, request: Request, now: float) -> None:
        """Adds a request to its lane."""
        lane = self._policy.lane(request)
        entry = self._policy.key(request, now), request.params.seniority, request
        heappush(self._lanes.setdefault(lane, []), entry)
        self._count(request, 1)

    def first(self, now: float) -> Request | None:
        """Returns the first request without removing it."""
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

    def abort(self, request: Request) -> None:
        """Removes an aborted request."""
        if self.release(request.params.handle) is not None:
            return
        self._count(request, -1)
        self._num_aborted += 1
        if self._num_aborted > len(self) + 64:
            self._drop_aborted()

    def sort(self, now: float) -> None:
        """Recomputes all keys."""
        self._drop_aborted()
        for heap in self._lanes.values():
            heap[:] = [(self._policy.key(request, now), seniority, request) for _, seniority, request in heap]
            heapify(heap)

    def _top(self, heap: list[Entry], now: float) -> Request:
        """Returns the first request of a non-empty lane. Updates grown keys."""
        while True:
            key, seniority, request = heap[0]
            if request.has_ended:
                heappop(heap)
                self._num_aborted -= 1
                continue
            current_key = self._policy.key(request, now)
            if current_key <= key:
                return request
            heapreplace(heap, (current_key, seniority, request))

    def _count(self, request: Request, change: int) -> None:
        lane = self._policy.lane(request)
        if change > 0:
            self.totals.add(request)
        else:
            self.totals.remove(request)
        self._counts[lane] = self._counts.get(lane, 0) + change
        if not self._counts[lane]:
            del self._counts[lane]
            if not self._lanes[lane]:
                del self._lanes[lane]

    def _drop_aborted(self) -> None:
        self._num_aborted = 0
        for lane, heap in list(self._lanes.items()):
            heap[:] = [entry for entry in heap if not entry[2].has_ended]
            heapify(heap)
            if not heap:
                del self._lanes[lane]
