"""What the requests that wait come to: tokens, pages, the oldest of them. Kept as they come and go, so asking costs little.

How many tokens of a request the cache spares changes while it waits: `looked` puts that right, and `next` says whose turn it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx_api.cost import attended
from phalanx_runtime.core.request import Request


@dataclass(slots=True)
class _Weight:
    """What one request was counted for."""

    request: Request
    tokens: int
    outstanding: int
    missing: int
    pages: int
    since_s: float


class Waiting:
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
        weight = _Weight(request, tokens, request.outstanding_tokens, request.missing, pages, request.waits_since_s)
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
