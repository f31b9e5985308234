"""Polls every router for its summary and sends it the policy.

A router answers when its urgent state changes, else at the end of the poll; a new policy ends it. Unreachable routers are polled
with backoff, and their last summary is kept.
"""

import asyncio
import contextlib
import logging
import math
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import aiohttp
import msgspec

from phalanx_api import labels
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from phalanx_api.wire import HTTP_WRONG_VERSION, PROTOCOL_VERSION
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, evacuation_numbers, merge
from phalanx_operator.kube.client import SECRETS, KubeClient, KubeError
from phalanx_operator.kube.store import Key
from phalanx_operator.render import objects as names
from phalanx_operator.render.services import read_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollTiming:
    """Limits of polls."""

    slack_s: float = 10.0
    """Beyond the poll, until a router is unreachable."""
    stale_s: float = 45.0
    """Age at which a summary is ignored."""
    explain_s: float = 5.0
    """Between two explanations of a service, which reads all summaries."""
    pause_s: float = 0.2
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    max_bytes: int = 16 << 20
    token_s: float = 60.0
    """Age at which the service's token is read again; each step of a rotation lasts ten minutes."""
    token_read_s: float = 5.0
    """Limit of that; the former token remains."""


DEFAULT_TIMING = PollTiming()


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """One router to poll."""

    uid: str
    """UID of the router pod."""
    address: str
    """`host:port` of the router pod."""
    is_https: bool = False
    """Serves HTTPS. Its certificate is for clients, names no pod, and is not verified."""
    peer_name: str = ""
    """Name in its certificate for other pods; empty: it has none."""
    is_ready: bool = field(default=True, compare=False)
    """False on a silent node or of a router that ends: it counts only while it answers."""
    is_leaving: bool = field(default=False, compare=False)
    """Its pod is being deleted: no answer is expected."""


class Identity(Protocol):
    """The operator's certificates, one for each service with `spec.security.tls: Internal`."""

    async def context(self, key: Key) -> ssl.SSLContext:
        """Returns the client's context for a service. Raises KubeError."""
        ...

    def forget(self, key: Key) -> None:
        """Drops the certificate of a service."""
        ...


Explain = Callable[[Sequence[RouterSummary]], list[str]]
"""Returns what limits a service, by the summaries of its routers."""


class Routers(Protocol):
    """The routers as reconciles use them."""

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """Returns the merged reports of these routers."""
        ...

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        """Polls exactly these routers from now on. explain: for a service with a console."""
        ...

    def forget(self, key: Key) -> None:
        """Ends the polls of this service."""
        ...


class PollFailed(Exception):
    """A response without a valid summary."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.has_no_endpoint = status == 404
        self.is_incompatible = status == HTTP_WRONG_VERSION
        self.is_denied = status in (401, 403)


@dataclass(slots=True, kw_only=True)
class _Service:
    policy: BalancePolicy
    poll_s: float
    explain: Explain | None = None
    explained: list[str] = field(default_factory=list)
    explained_s: float = -math.inf
    routers: dict[str, "_Router"] = field(default_factory=dict)
    evacuations: dict[str, int]
    """See `evacuation_numbers`."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the policy changes, then replaced by a new event."""
    token: str | None = None
    token_read_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Router:
    target: RouterTarget
    created_s: float
    task: "asyncio.Task[None] | None" = None
    summary: RouterSummary | None = None
    answered_s: float = 0.0
    has_no_endpoint: bool = False
    is_incompatible: bool = False
    was_polled: bool = False
    """A poll has ended."""
    is_silent: bool = False
    """The last poll had no response."""
    unreachable_since_s: float | None = None
    """Time of the first failed connection since its last response; timeouts of polls count as failed."""


def poll_session() -> aiohttp.ClientSession:
    """Returns a session without a limit of connections: the poll of each router holds one. aiohttp's default is 100."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class RouterPoller:
    """`Routers` over HTTP. Changed urgent state wakes the service."""

    def __init__(
        self,
        client: KubeClient,
        http: aiohttp.ClientSession,
        wake: Callable[[Key], None],
        identity: Identity,
        timing: PollTiming = DEFAULT_TIMING,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._http = http
        self._wake = wake
        self._identity = identity
        self._timing = timing
        self._clock = clock
        self._draw = draw
        self._services: dict[Key, _Service] = {}

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """See Routers."""
        service = self._services.get(key)
        by_uid = service.routers if service else {}
        routers = [by_uid[target.uid] for target in targets if target.uid in by_uid]
        now_s = self._clock()
        had_time = {router.target.uid for router in routers if self._had_time(router, now_s)}
        is_new = bool(targets) and not had_time
        reports = [
            RouterReport(router.target.uid, now_s - router.answered_s, router.summary)
            for router in routers
            if router.summary is not None and not router.has_no_endpoint
        ]
        answered = {report.router for report in reports if report.age_s <= self._timing.stale_s}
        excluded = {router.target.uid for router in routers if router.has_no_endpoint}
        silent = {target.uid for target in targets if not target.is_ready} - answered
        gone = silent & had_time - excluded
        unanswered = gone - {target.uid for target in targets if target.is_leaving}
        unreachable = {router.target.uid for router in routers if self._is_unreachable(router, now_s)} & silent
        polled = len({target.uid for target in targets} - excluded - gone)
        fleet = merge(reports, polled, self._timing.stale_s, service.evacuations if service else {})
        why = f"its summary version is not {PROTOCOL_VERSION}"
        unknown = [f"router {router.target.address}: {why}" for router in routers if router.is_incompatible]
        unknown += fleet.unknown_versions
        return replace(
            fleet,
            unknown_versions=tuple(unknown),
            is_new=is_new,
            unanswered=len(unanswered),
            unreachable=frozenset(unreachable),
        )

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        """See Routers."""
        if key not in self._services:
            self._services[key] = _Service(policy=policy, poll_s=poll_s, evacuations=evacuation_numbers({}, policy))
        service = self._services[key]
        service.explain = explain
        by_uid = {target.uid: target for target in targets}
        for uid, router in list(service.routers.items()):
            if by_uid.get(uid) != router.target:
                self._drop(service, uid)
        if (policy, poll_s) != (service.policy, service.poll_s):
            service.policy, service.poll_s = policy, poll_s
            service.evacuations = evacuation_numbers(service.evacuations, policy)
            service.changed.set()
            service.changed = asyncio.Event()
        for uid, target in by_uid.items():
            if uid not in service.routers:
                router = service.routers[uid] = _Router(target=target, created_s=self._clock())
                router.task = asyncio.get_running_loop().create_task(self._poll_forever(key, service, router))

    def forget(self, key: Key) -> None:
        """See Routers."""
        self._identity.forget(key)
        if service := self._services.pop(key, None):
            for uid in list(service.routers):
                self._drop(service, uid)

    async def close(self) -> None:
        """Ends all polls."""
        tasks = [router.task for service in self._services.values() for router in service.routers.values() if router.task]
        for key in list(self._services):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _had_time(self, router: _Router, now_s: float) -> bool:
        """A changing policy may end each poll early."""
        return router.was_polled or now_s - router.created_s >= self._timing.slack_s

    def _is_unreachable(self, router: _Router, now_s: float) -> bool:
        """One failed poll is no evidence, and any response is evidence of life."""
        return router.unreachable_since_s is not None and now_s - router.unreachable_since_s >= self._timing.slack_s

    def _drop(self, service: _Service, uid: str) -> None:
        if task := service.routers.pop(uid).task:
            task.cancel()

    async def _poll_forever(self, key: Key, service: _Service, router: _Router) -> None:
        failures = 0
        while True:
            try:
                await self._poll_once(key, service, router)
                failures = 0
                await asyncio.sleep(self._timing.pause_s)
                continue
            except PollFailed as error:
                why = str(error)
                router.has_no_endpoint, router.unreachable_since_s = error.has_no_endpoint, None
                if error.is_incompatible and not router.is_incompatible:
                    router.is_incompatible, router.summary = True, None
                    self._wake(key)
                service.token = None if error.is_denied else service.token
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, KubeError) as error:
                why = str(error) or type(error).__name__
                if isinstance(error, aiohttp.ClientSSLError):
                    router.unreachable_since_s = None
                    self._identity.forget(key)  # the service may have a new authority
                elif isinstance(error, aiohttp.ClientConnectionError | TimeoutError) and router.unreachable_since_s is None:
                    router.unreachable_since_s = self._clock()
            except Exception as error:  # a bug here must end neither the polls nor the operator
                log.critical("poll failed", extra={"service": "/".join(key)}, exc_info=error)
                why = type(error).__name__
            level = logging.WARNING if failures == 0 else logging.DEBUG
            log.log(level, "router unreachable", extra={"service": "/".join(key), "router": router.target.address, "why": why})
            wait_s = self._retry_s(router, failures)
            failures, router.is_silent = failures + 1, True
            if not router.was_polled:
                router.was_polled = True
                self._wake(key)
            await asyncio.sleep(wait_s)

    def _retry_s(self, router: _Router, failures: int) -> float:
        timing = self._timing
        wait_s = timing.last_retry_s if router.has_no_endpoint else timing.first_retry_s * 2.0 ** min(failures, 10)
        return min(wait_s, timing.last_retry_s) * (0.5 + 0.5 * self._draw())

    async def _poll_once(self, key: Key, service: _Service, router: _Router) -> None:
        """Makes one poll; a new policy ends it."""
        changed = service.changed
        await self._keep_token(key, service)
        poll = asyncio.ensure_future(self._poll(key, service, router))
        change = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait((poll, change), return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            if not poll.done():
                poll.cancel()
            await asyncio.gather(poll, change, return_exceptions=True)
        if poll.cancelled():
            router.is_silent = True
            return
        summary = poll.result()
        former, router.summary = router.summary, summary
        router.answered_s, router.has_no_endpoint, router.is_incompatible = self._clock(), False, False
        router.was_polled, router.is_silent, router.unreachable_since_s = True, False, None
        if former is None or _urgent_state(former) != _urgent_state(summary):
            service.explained_s = -math.inf
            self._wake(key)

    async def _poll(self, key: Key, service: _Service, router: _Router) -> RouterSummary:
        """Raises PollFailed, KubeError, and errors of aiohttp and msgspec."""
        is_stale = router.summary is None or router.is_silent  # the stored summary may be as old as one poll
        wait_s = 0.0 if is_stale else service.poll_s
        target = router.target
        scheme = "https://" if target.is_https or target.peer_name else "http://"
        context = await self._identity.context(key) if target.peer_name else not target.is_https  # false: not verified
        headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
        async with self._http.post(
            f"{scheme}{target.address}{SUMMARY_PATH}",
            data=msgspec.json.encode(SummaryRequest(service.policy, wait_s, explanation=self._explanation(service))),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=wait_s + self._timing.slack_s, sock_connect=5.0),
            allow_redirects=False,
            ssl=context,
            server_hostname=target.peer_name or None,
        ) as response:
            if response.status != 200:
                raise PollFailed(response.status)
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._timing.max_bytes:
                    raise PollFailed(response.status)
        summary = msgspec.json.decode(body, type=RouterSummary)
        if summary.version != PROTOCOL_VERSION:
            raise PollFailed(HTTP_WRONG_VERSION)
        return summary

    def _explanation(self, service: _Service) -> list[str]:
        """Returns what limits a service by its recent summaries, computed at most once per `explain_s` for all its routers."""
        now_s, timing = self._clock(), self._timing
        if service.explain is None:
            return []
        if now_s - service.explained_s < timing.explain_s:
            return service.explained
        recent = [
            router.summary
            for router in service.routers.values()
            if router.summary is not None and not router.has_no_endpoint and now_s - router.answered_s <= timing.stale_s
        ]
        if not recent:
            return []
        service.explained_s = now_s
        try:
            service.explained = service.explain(recent)
        except Exception:  # a bug here must not end the polls
            log.exception("cannot explain the service")
            service.explained = []
        return service.explained

    async def _keep_token(self, key: Key, service: _Service) -> None:
        """Reads the token at first, and again before routers can refuse it. Raises KubeError without any.

        It stays if the Secret is unreadable.
        """
        now_s, timing = self._clock(), self._timing
        if service.token is None:
            service.token, service.token_read_s = await self._read_token(key), now_s
        elif now_s - service.token_read_s >= timing.token_s:
            service.token_read_s = now_s
            with contextlib.suppress(KubeError, TimeoutError):  # polls continue without the API server
                async with asyncio.timeout(timing.token_read_s):
                    service.token = await self._read_token(key) or service.token

    async def _read_token(self, key: Key) -> str:
        """Returns the token to send; empty for an unreadable Secret. Raises KubeError."""
        tokens = read_tokens(await self._client.get(SECRETS, key[0], names.token_secret(key[1])))
        return tokens[0] if tokens else ""


def _urgent_state(summary: RouterSummary) -> object:
    """Returns what starts or ends, not what rises and falls."""
    hotspots = tuple(sorted((hotspot.group, hotspot.cause, hotspot.action) for hotspot in summary.hotspots))
    unknown = tuple(sorted(version.group for version in summary.unknown_versions))
    groups = ((g.group, g.state == "dead", g.deaths, g.excused, g.draft_lost, tuple(map(str, g.devices))) for g in summary.groups)
    drains = tuple(sorted(request.group for request in summary.drain_requests))
    evacuated = tuple(sorted(summary.evacuated))
    refused = tuple(sorted((group.group, refused.name) for group in summary.groups for refused in group.refused_adapters))
    return hotspots, summary.fleet_saturated, evacuated, summary.held > 0, unknown, tuple(sorted(groups)), drains, refused


def address_of(ip: str, port: int = labels.HTTP_PORT) -> str:
    """Returns host:port of a router pod."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
