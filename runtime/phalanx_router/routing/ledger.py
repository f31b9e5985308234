"""Dispatch ledger: what this router sent to one group since the group's last load report.

    A report with `last_handle` covers every Submit up to that handle.
    unseen = sent after it and not ended          live = sent and not ended

The last report plus `unseen` describes the group now; without reports, `live` is all that is known.
"""

from collections import deque
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cost import attended


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """Load that one request adds to a group."""

    # Tokens that no page of the group holds.
    prompt_tokens: int = 0
    context_tokens: int = 0
    pages: int = 0
    # Maximum.
    output_tokens: int = 0
    # Sum of the context lengths of `prompt_tokens`.
    attended: float = 0.0


def make_sent_request(request: wire.Request, page_size: int, hit_tokens: int = 0) -> SentRequest:
    """Returns the load that `request` adds to a group that holds `hit_tokens` of its tokens."""
    context, given = len(request.prompt) + len(request.delivered), len(request.delivered)
    missing = max(1, context - hit_tokens)
    behind = attended(context, context - missing)
    return SentRequest(
        prompt_tokens=missing,
        context_tokens=context,
        pages=-(-missing // page_size),
        output_tokens=max(0, request.sampling.max_tokens - given),
        attended=behind,
    )


@dataclass(slots=True, kw_only=True)
class LedgerTotals:
    """Number of requests and the sums of their load."""

    requests: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    pages: int = 0
    output_tokens: int = 0
    attended: float = 0.0

    def add(self, sent: SentRequest, times: int = 1) -> None:
        """Adds a request, or removes it with `times=-1`."""
        self.requests += times
        self.prompt_tokens += times * sent.prompt_tokens
        self.context_tokens += times * sent.context_tokens
        self.pages += times * sent.pages
        self.output_tokens += times * sent.output_tokens
        self.attended += times * sent.attended


class DispatchLedger:
    """Requests by handle, which increase. `version` changes with `unseen` and `live`."""

    __slots__ = ("_entries", "_found", "_last_seen", "_waiting", "live", "unseen", "version")

    def __init__(self) -> None:
        self.unseen = LedgerTotals()
        self.live = LedgerTotals()
        self.version = 0
        self._entries: dict[int, SentRequest] = {}
        self._waiting: deque[tuple[int, float]] = deque()
        """Handles that no report covers, with the times when they were sent."""
        self._found: set[int] = set()
        """Handles of adopted requests."""
        self._last_seen = 0

    def dispatch(self, handle: int, sent: SentRequest, now: float) -> None:
        """Records a request sent to the group."""
        self._entries[handle] = sent
        self._waiting.append((handle, now))
        self.unseen.add(sent)
        self.live.add(sent)
        self.version += 1

    def found(self, handle: int, sent: SentRequest) -> None:
        """Records an adopted request, which the group's reports already count."""
        self._entries[handle] = sent
        self._found.add(handle)
        self.live.add(sent)
        self.version += 1

    def report(self, last_handle: int) -> None:
        """Records that a load report covers all requests up to `last_handle`."""
        self._last_seen = max(self._last_seen, last_handle)
        while self._waiting and self._waiting[0][0] <= self._last_seen:
            sent = self._entries.get(self._waiting.popleft()[0])
            if sent is not None:
                self.unseen.add(sent, -1)
                self.version += 1

    def ended(self, handle: int) -> None:
        """Removes a request that the group has finished or lost. An unknown handle is ignored."""
        sent = self._entries.pop(handle, None)
        if sent is None:
            return
        self.version += 1
        self.live.add(sent, -1)
        if handle in self._found:
            self._found.remove(handle)
        elif handle > self._last_seen:
            self.unseen.add(sent, -1)

    def unseen_since(self) -> float | None:
        """Returns when the oldest live request that no report covers was sent."""
        while self._waiting and self._waiting[0][0] not in self._entries:
            self._waiting.popleft()
        return self._waiting[0][1] if self._waiting else None
