"""Answers of the data endpoints: one snapshot for all viewers, built at most once per `PERIOD_S` and only on request."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from phalanx_api.summary import RouterSummary
from phalanx_router.backend import RouterBackend
from phalanx_router.console import snapshot
from phalanx_router.request_log import RequestLog, RequestTimeline
from phalanx_router.session import FleetSettings

PERIOD_S = 1.0
MAX_TENANTS = 64
"""Cached lists of requests; more are dropped together."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An encoded snapshot."""

    content: bytes
    etag: str
    made_at: float


class CachedAnswer:
    """An answer that is built again when it is requested and `PERIOD_S` old."""

    def __init__(self, build: Callable[[], object], clock: Callable[[], float]) -> None:
        self._build = build
        self._clock = clock
        self._answer: Answer | None = None

    def get(self) -> Answer:
        """Returns the answer. Its ETag changes with its content."""
        now, before = self._clock(), self._answer
        if before is not None and now - before.made_at < PERIOD_S:
            return before
        content = msgspec.json.encode(self._build())
        self._answer = Answer(content, f'"{blake2b(content, digest_size=12).hexdigest()}"', now)
        return self._answer


class ConsoleAnswers:
    """The data of one router."""

    def __init__(
        self,
        backend: RouterBackend,
        log: RequestLog,
        summary: Callable[[], RouterSummary],
        settings: FleetSettings,
        explanation: Callable[[], list[str]],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._log = log
        self._summary = summary
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self.instance = secrets.token_hex(4)
        """Differs with each process: numbers of requests are those of one."""
        self.fleet = CachedAnswer(lambda: self._fleet([]), clock)
        """For keys of tenants: without the explanation, which names pods and nodes."""
        self.explained_fleet = CachedAnswer(lambda: self._fleet(explanation()), clock)
        self.settings = CachedAnswer(self._settings_state, clock)
        self._requests: dict[str | None, CachedAnswer] = {}

    def requests(self, tenant: str | None) -> CachedAnswer:
        """Requests of a tenant; of all tenants without one."""
        if len(self._requests) > MAX_TENANTS:
            self._requests.clear()
        if tenant not in self._requests:
            self._requests[tenant] = CachedAnswer(lambda: self._request_list(tenant), self._clock)
        return self._requests[tenant]

    def find(self, id: str, tenant: str | None) -> RequestTimeline | None:
        """Newest request of a tenant with this number or id of its answer."""
        found = self._log.find(int(id)) if id.isascii() and id.isdecimal() and len(id) < 19 else None
        candidates = [found] if found is not None else self._log.named(id) if id else []
        return next((line for line in candidates if tenant is None or line.tenant == tenant), None)

    def details(self, line: RequestTimeline) -> bytes:
        """One request with its time line."""
        return msgspec.json.encode(snapshot.request_details(line, self._clock(), self._wall_clock()))

    def _request_list(self, tenant: str | None) -> object:
        return snapshot.request_list(self._log.newest(), tenant, self._clock(), self._wall_clock(), self.instance)

    def _fleet(self, explanation: list[str]) -> object:
        summary = self._summary()
        links = self._backend.links.all()
        return snapshot.fleet_state(
            summary,
            loads={link.endpoint.group: link.group_report.load for link in links},
            timelines=self._log.open(),
            moves=self._log.moves,
            drain_requests=[request.group for request in summary.drain_requests],
            policy=self._backend.balancing.policy,
            now=self._clock(),
            instance=self.instance,
            explanation=explanation,
        )

    def _settings_state(self) -> object:
        return snapshot.settings_state(self._summary(), self._settings, self._backend.balancing.policy)
