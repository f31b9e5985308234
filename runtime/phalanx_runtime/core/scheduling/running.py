"""Running requests and their rows, and the choice of a preemption victim when the page pool is exhausted.

A request in a plan in flight is never preempted and keeps its pages until that plan is committed; neither is a frozen one. A
reserved row belongs to a request that arrives by a move (`reservations`).
"""

from collections.abc import Callable, Iterable

from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request

Place = tuple[float, float, tuple[float, int]]
"""Sort value of a request in the policy's order."""


class RunningSet:
    """Rows 0 to num_rows - 1, each free or of one running request."""

    def __init__(self, num_rows: int, sharing: PrefixSharing) -> None:
        self.running: list[Request] = []
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._sharing = sharing

    @property
    def free(self) -> int:
        """Number of further requests that can run."""
        return len(self._free_rows)

    def sort(self, place: Callable[[Request], Place]) -> None:
        """Sorts running requests by the policy; the last is preempted first."""
        self.running.sort(key=place)

    def add(self, request: Request, row: int | None = None) -> None:
        """Assigns a row to the request, or the row reserved for it."""
        request.row = self._free_rows.pop() if row is None else row
        self.running.append(request)

    def reserve(self) -> int:
        """Returns a free row, reserved for a request that arrives by a move."""
        return self._free_rows.pop()

    def unreserve(self, row: int) -> None:
        """Frees a reserved row."""
        self._free_rows.append(row)

    def preempt_last(self) -> Request | None:
        """Preempts and returns the last request that is in no plan and not frozen, if there is one; it has no row and pages
        then."""
        for position in range(len(self.running) - 1, -1, -1):
            request = self.running[position]
            if not request.in_flight and not request.is_frozen:
                del self.running[position]
                self._let_go(request)
                return request
        return None

    def drop_gone(self) -> None:
        """Frees rows and pages of finished requests, unless a plan in flight writes them."""
        leaving = [request for request in self.running if request.gone and not request.in_flight]
        if leaving:
            self.running = [request for request in self.running if not request.gone or request.in_flight]
            for request in leaving:
                self._let_go(request)

    def check(self, reserved: Iterable[tuple[int, list[int]]] = ()) -> list[str]:
        """Returns errors of pages and rows, given the reserved ones; empty if consistent."""
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
