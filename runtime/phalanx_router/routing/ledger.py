"""The ledger of one group: what this router sent there, and how much of it no report has seen yet.

    a report that names `last_handle` has seen every Submit up to that handle
    unseen = sent after it and not ended          live = sent and not ended

A report and what is unseen make the group as of now; when no reports come at all, what is live is all that is known.
"""

from collections import deque
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cost import attended


@dataclass(frozen=True, slots=True)
class Sent:
    """What a request adds to a group: prompt tokens that no page there holds, tokens of context, pages, output tokens at most.

    attended: the sum of the contexts of those prompt tokens.
    """

    prompt_tokens: int = 0
    context_tokens: int = 0
    pages: int = 0
    output_tokens: int = 0
    attended: float = 0.0


def sent_of(request: wire.Request, page_size: int, hit_tokens: int = 0) -> Sent:
    """What this request adds to a group whose pages hold so many of its tokens."""
    context, given = len(request.prompt) + len(request.delivered), len(request.delivered)
    missing = max(1, context - hit_tokens)
    behind = attended(context, context - missing)
    return Sent(missing, context, -(-missing // page_size), max(0, request.sampling.max_tokens - given), behind)


@dataclass(slots=True)
class Sums:
    """So many requests, and the sums of what they add."""

    requests: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    pages: int = 0
    output_tokens: int = 0
    attended: float = 0.0

    def add(self, sent: Sent, times: int = 1) -> None:
        """Adds a request, or with `times` -1 takes it off again."""
        self.requests += times
        self.prompt_tokens += times * sent.prompt_tokens
        self.context_tokens += times * sent.context_tokens
        self.pages += times * sent.pages
        self.output_tokens += times * sent.output_tokens
        self.attended += times * sent.attended


class Ledger:
    """Requests by their handles, which rise. `version` changes with what is unseen or live."""

    __slots__ = ("_entries", "_found", "_last_seen", "_waiting", "live", "unseen", "version")

    def __init__(self) -> None:
        self.unseen = Sums()
        self.live = Sums()
        self.version = 0
        self._entries: dict[int, Sent] = {}
        self._waiting: deque[tuple[int, float]] = deque()
        """Handles that no report has seen, with the times when they were sent."""
        self._found: set[int] = set()
        """Handles of requests that ran there before this router had them."""
        self._last_seen = 0

    def dispatch(self, handle: int, sent: Sent, now: float) -> None:
        """Notes a request that goes to the group now."""
        self._entries[handle] = sent
        self._waiting.append((handle, now))
        self.unseen.add(sent)
        self.live.add(sent)
        self.version += 1

    def found(self, handle: int, sent: Sent) -> None:
        """Notes a request that the group has and reports count already: it was adopted."""
        self._entries[handle] = sent
        self._found.add(handle)
        self.live.add(sent)
        self.version += 1

    def report(self, last_handle: int) -> None:
        """Notes that the group has seen all requests up to this handle."""
        self._last_seen = max(self._last_seen, last_handle)
        while self._waiting and self._waiting[0][0] <= self._last_seen:
            sent = self._entries.get(self._waiting.popleft()[0])
            if sent is not None:
                self.unseen.add(sent, -1)
                self.version += 1

    def ended(self, handle: int) -> None:
        """Notes that the group has this request no more. An unknown one is no error."""
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
        """When the oldest request that runs there and that no report has seen was sent."""
        while self._waiting and self._waiting[0][0] not in self._entries:
            self._waiting.popleft()
        return self._waiting[0][1] if self._waiting else None
