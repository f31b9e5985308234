"""Running requests, their rows, and preemption."""

from collections.abc import Callable, Iterable

from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request

SortKey = tuple[float, float, tuple[float, int]]
"""Position of a request in the policy's order."""


class RunningSet:
    """Rows 0 to num_rows - 1: free, reserved for a moved request, or assigned."""

    def __init__(self, num_rows: int, sharing: PrefixSharing) -> None:
        self.requests: list[Request] = []
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._left_rows: list[int] = []
        self._sharing = sharing
        self._max_requests = num_rows
        """Fewer than the rows after a step had no memory; each request that ends raises it by one."""

    @property
    def num_free_rows(self) -> int:
        """Number of further requests that can run."""
        return min(len(self._free_rows), max(0, self._max_requests - len(self.requests)))

    def sort(self, key: Callable[[Request], SortKey]) -> None:
        """Sorts the requests; the last is preempted first."""
        self.requests.sort(key=key)

    def add(self, request: Request, row: int | None = None) -> None:
        """Adds a request in its reserved row, or in a free one."""
        request.row = self._free_rows.pop() if row is None else row
        self.requests.append(request)

    def reserve(self) -> int:
        """Reserves and returns a free row."""
        return self._free_rows.pop()

    def unreserve(self, row: int) -> None:
        """Frees a reserved row."""
        self._free_rows.append(row)

    @property
    def is_last_in_flight(self) -> bool:
        """Whether the last request that is not frozen is in flight, so that it cannot be preempted yet."""
        return next((request.in_flight > 0 for request in reversed(self.requests) if not request.is_frozen), False)

    @property
    def last_idle(self) -> Request | None:
        """The last request that is neither frozen nor in flight."""
        return next((request for request in reversed(self.requests) if not (request.in_flight or request.is_frozen)), None)

    def take_left_rows(self) -> list[int]:
        """Returns the rows that requests left since the previous call."""
        left, self._left_rows = self._left_rows, []
        return left

    def preempt_last(self) -> Request | None:
        """Preempts and returns the last request that is neither frozen nor in flight."""
        request = self.last_idle
        if request is not None:
            self.preempt(request)
        return request

    def preempt_newest(self, requests: Iterable[Request]) -> Request | None:
        """Preempts and returns the newest of `requests` that runs, is not frozen and in no plan, and lets fewer requests run."""
        candidates = [request for request in requests if request.row is not None and not (request.in_flight or request.is_frozen)]
        newest = max(candidates, key=lambda request: request.params.seniority, default=None)
        if newest is not None:
            self.preempt(newest)
            self._max_requests = max(1, len(self.requests))
        return newest

    def preempt(self, request: Request) -> None:
        """Preempts a request that is in no plan."""
        self.requests.remove(request)
        self._release(request)

    def drop_ended(self) -> None:
        """Frees rows and pages of ended requests, except those in a plan in flight."""
        leaving = [request for request in self.requests if request.has_ended and not request.in_flight]
        if leaving:
            self.requests = [request for request in self.requests if not request.has_ended or request.in_flight]
            for request in leaving:
                self._release(request)
            self._max_requests = min(self._num_rows, self._max_requests + len(leaving))

    def check(
        self,
        reserved: Iterable[tuple[int, list[int]]] = (),
        sent: Iterable[list[int]] = (),
        with_parts: Iterable[list[int]] = (),
    ) -> list[str]:
        """Returns errors of pages and rows, given the reserved ones and the pages `sent` to other groups.

        `with_parts`: pages, of reserved and sent ones, whose parts are held.
        """
        reservations = list(reserved)
        held_pages = [request.pages.held for request in self.requests] + [pages for _, pages in reservations]
        errors = self._sharing.pool.check([*held_pages, *sent])
        if self._sharing.parts is not None:
            errors += self._sharing.parts.check([*with_parts, *(request.pages.with_parts for request in self.requests)])
        held = [row for row, _ in reservations] + [request.row for request in self.requests if request.row is not None]
        rows = sorted(self._free_rows + held)
        if rows != list(range(self._num_rows)):
            errors.append(f"rows are {rows}, expected each of {self._num_rows} once")
        return errors

    def _release(self, request: Request) -> None:
        assert request.row is not None, "only running requests have a row"
        self._sharing.release(request)
        request.scheduling.num_preemptions += 1
        self._free_rows.append(request.row)
        self._left_rows.append(request.row)
        request.row = None
