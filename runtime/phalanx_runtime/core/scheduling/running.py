"""Running requests and their rows: who runs, who is preempted when pages run out, who leaves.

A request in a plan in flight is never preempted, and its pages stay its own until that plan is committed. Nor is a frozen one.
A reserved row is of a request that will come by a move (`reservations`).
"""

from collections.abc import Callable, Iterable

from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request

Place = tuple[float, float, tuple[float, int]]
"""Where a request stands in the order of the policy."""


class RunningSet:
    """Rows 0 to num_rows - 1, each free or of one running request."""

    def __init__(self, num_rows: int, sharing: PrefixSharing) -> None:
        self.running: list[Request] = []
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._sharing = sharing

    @property
    def free(self) -> int:
        """How many requests more can run."""
        return len(self._free_rows)

    def sort(self, place: Callable[[Request], Place]) -> None:
        """Puts running requests in the order of the policy; the last is preempted first."""
        self.running.sort(key=place)

    def add(self, request: Request, row: int | None = None) -> None:
        """Gives the request a row, or the one that was reserved for it."""
        request.row = self._free_rows.pop() if row is None else row
        self.running.append(request)

    def reserve(self) -> int:
        """A row that is free, kept for a request that will come."""
        return self._free_rows.pop()

    def unreserve(self, row: int) -> None:
        """Gives a reserved row back."""
        self._free_rows.append(row)

    def preempt_last(self) -> Request | None:
        """The last request in no plan, now without row and pages; None when all are in plans or frozen."""
        for position in range(len(self.running) - 1, -1, -1):
            request = self.running[position]
            if not request.in_flight and not request.is_frozen:
                del self.running[position]
                self._let_go(request)
                return request
        return None

    def drop_gone(self) -> None:
        """Frees rows and pages of requests that ended or were aborted, if no plan in flight writes them."""
        leaving = [request for request in self.running if request.gone and not request.in_flight]
        if leaving:
            self.running = [request for request in self.running if not request.gone or request.in_flight]
            for request in leaving:
                self._let_go(request)

    def check(self, reserved: Iterable[tuple[int, list[int]]] = ()) -> list[str]:
        """What is wrong with pages and rows, given those that are reserved; empty when all are accounted for."""
        kept = list(reserved)
        wrong = self._sharing.pool.check([request.pages for request in self.running] + [pages for _, pages in kept])
        held = [row for row, _ in kept] + [request.row for request in self.running if request.row is not None]
        rows = sorted(self._free_rows + held)
        if rows != list(range(self._num_rows)):
            wrong.append(f"rows are {rows}, expected each of {self._num_rows} once")
        return wrong

    def _let_go(self, request: Request) -> None:
        assert request.row is not None, "only running requests hold a row"
        self._sharing.let_go(request)
        request.num_losses += 1
        self._free_rows.append(request.row)
        request.row = None
