"""Dispatch ledger: requests that this router sent to one group.

    live = sent and not ended          unreported = live requests that no load report covers

A report covers every Submit up to its `last_handle`. The last report plus `unreported` is the present load.
"""

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cost import attention_work


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """Load that one request adds to a group."""

    prompt_tokens: int = 0  # without cached tokens
    context_tokens: int = 0
    pages: int = 0
    attention: float = 0.0  # sum of the context lengths of `prompt_tokens`
    adapter: str = ""  # name


def request_pages(tokens: int, page_size: int, max_pages: int = 0) -> int:
    """Returns the pages of a request, at most `max_pages` if that is set: requests of some models drop pages as they compute."""
    num_pages = -(-tokens // page_size)
    return min(num_pages, max_pages) if max_pages else num_pages


def make_sent_request(request: wire.Request, page_size: int, hit_tokens: int = 0, max_pages: int = 0) -> SentRequest:
    """Load of `request` in a group with `hit_tokens` cached tokens. `max_pages`: see `request_pages`."""
    context = len(request.prompt) + len(request.delivered)
    missing = max(1, context - hit_tokens)
    return SentRequest(
        prompt_tokens=missing,
        context_tokens=context,
        pages=request_pages(missing, page_size, max_pages),
        attention=attention_work(context, context - missing),
        adapter=request.adapter.name if request.adapter else "",
    )


@dataclass(slots=True, kw_only=True)
class LedgerTotals:
    """Number of requests and sums of their load."""

    requests: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    pages: int = 0
    attention: float = 0.0

    def add(self, sent: SentRequest, times: int = 1) -> None:
        """Adds a request, or removes it with `times=-1`."""
        self.requests += times
        self.prompt_tokens += times * sent.prompt_tokens
        self.context_tokens += times * sent.context_tokens
        self.pages += times * sent.pages
        self.attention += times * sent.attention


class ShortestTime:
    """Shortest of the values of the last one to two periods of `PERIOD_S`."""

    PERIOD_S = 30.0
    __slots__ = ("_before", "_current", "_since")

    def __init__(self) -> None:
        self._before = self._current = math.inf
        self._since = -math.inf

    def add(self, value_s: float, now: float) -> None:
        """Adds a value."""
        if now - self._since >= self.PERIOD_S:
            is_recent = now - self._since < 2 * self.PERIOD_S
            self._before, self._current, self._since = self._current if is_recent else math.inf, math.inf, now
        self._current = min(self._current, value_s)

    @property
    def has_value(self) -> bool:
        """Whether any value was added."""
        return math.isfinite(min(self._before, self._current))

    @property
    def value_s(self) -> float:
        """The shortest; 0 without values."""
        return min(self._before, self._current) if self.has_value else 0.0


class DispatchLedger:
    """Requests by handle; handles increase."""

    __slots__ = (
        "_adopted",
        "_entries",
        "_last_reported",
        "_pending",
        "adapter_used_at",
        "adapters",
        "live",
        "unreported",
        "version",
    )

    def __init__(self) -> None:
        self.unreported = LedgerTotals()
        self.live = LedgerTotals()
        self.version = 0  # changes with both
        self.adapters = Counter[str]()  # of live requests, by name
        self.adapter_used_at: dict[str, float] = {}  # time of the last request that was sent, by name
        self._entries: dict[int, SentRequest] = {}
        self._pending: deque[tuple[int, float]] = deque()  # unreported handles, with times
        self._adopted: set[int] = set()
        self._last_reported = 0

    def dispatch(self, handle: int, sent: SentRequest, now: float) -> None:
        """Records a request sent to the group."""
        self._entries[handle] = sent
        self._pending.append((handle, now))
        if sent.adapter:
            self.adapters[sent.adapter] += 1
            self.adapter_used_at[sent.adapter] = now
        self.unreported.add(sent)
        self.live.add(sent)
        self.version += 1

    def adopt(self, handle: int, sent: SentRequest) -> None:
        """Records an adopted request, which reports already count."""
        self._entries[handle] = sent
        self._adopted.add(handle)
        if sent.adapter:
            self.adapters[sent.adapter] += 1
        self.live.add(sent)
        self.version += 1

    def report(self, last_handle: int) -> None:
        """Records a load report that covers requests up to `last_handle`."""
        self._last_reported = max(self._last_reported, last_handle)
        while self._pending and self._pending[0][0] <= self._last_reported:
            handle, _ = self._pending.popleft()
            sent = self._entries.get(handle)
            if sent is not None:
                self.unreported.add(sent, -1)
                self.version += 1

    def end(self, handle: int) -> None:
        """Removes a request. Unknown handles are ignored."""
        sent = self._entries.pop(handle, None)
        if sent is None:
            return
        self.version += 1
        self.live.add(sent, -1)
        if sent.adapter:
            self.adapters[sent.adapter] -= 1
            self.adapters += Counter()  # without those at 0
        if handle in self._adopted:
            self._adopted.remove(handle)
        elif handle > self._last_reported:
            self.unreported.add(sent, -1)

    def retain_adapters(self, names: Collection[str]) -> None:
        """Forgets when adapters were used that the group no longer has."""
        self.adapter_used_at = {name: at for name, at in self.adapter_used_at.items() if name in names}

    def unreported_since(self) -> float | None:
        """Dispatch time of the oldest unreported request."""
        while self._pending and self._pending[0][0] not in self._entries:
            self._pending.popleft()
        return self._pending[0][1] if self._pending else None
