"""Requests that wait, in the order of the policy: a heap for each lane. A look at the first costs O(lanes), a change O(log n)."""

from heapq import heapify, heappop, heappush, heapreplace

from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy
from phalanx_runtime.core.waiting import Waiting

Entry = tuple[float, tuple[float, int], Request]
"""Key and seniority of a request when it was put there. No two have the same seniority, so requests are never compared."""


class Queue:
    """Waiting requests. Those that were aborted stay in their heap, uncounted, until they come up or outnumber the others.

    Those that are held wait like the others, but nobody is served before `release`: they are in no lane.
    """

    def __init__(self, policy: Policy, page_size: int) -> None:
        self.waiting = Waiting(page_size)
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
