"""Memory of images in one process: a request holds the pixels of its images until its answer has ended."""

from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_frontend.images.errors import NoImageMemory
from phalanx_frontend.limits import MemoryBudget

MAX_BYTES = 1 << 30


class ImageLease:
    """Bytes of one request."""

    def __init__(self, budget: MemoryBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.outlives_request = False
        """Whether an answer in the background ends it, in place of the HTTP request."""
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises NoImageMemory."""
        if not self._budget.take(self.tenant, num_bytes):
            raise NoImageMemory
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Releases bytes."""
        self._budget.give_back(self.tenant, num_bytes)
        self._num_bytes -= num_bytes

    def end(self) -> None:
        """Releases all bytes."""
        self.give_back(self._num_bytes)


LEASE: ContextVar[ImageLease] = ContextVar("LEASE")
"""Of the HTTP request that the current task serves."""


def current_lease() -> ImageLease:
    """Returns the lease of this HTTP request; outside of any, one without a bound."""
    return LEASE.get(None) or ImageLease(MemoryBudget(2**63), "")


class ImageLeaseMiddleware:
    """ASGI middleware that releases the images of a request when its answer has ended."""

    def __init__(self, app: ASGIApp, budget: MemoryBudget, tenant_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._budget = budget
        self._tenant_of = tenant_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lease = ImageLease(self._budget, self._tenant_of(scope))
        token = LEASE.set(lease)
        try:
            await self._app(scope, receive, send)
        finally:
            LEASE.reset(token)
            if not lease.outlives_request:
                lease.end()
