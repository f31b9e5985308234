"""Polls every router for its summary and sends it the policy: one long poll per router.

A router answers when its urgent state changes, else at the end of the poll. A new policy ends the poll and starts another. An
unreachable router is polled less often, down to once a minute. The last summary is kept until the router is deleted.
"""

import asyncio
import base64
import binascii
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import aiohttp
import msgspec

from phalanx_api import labels
from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, RouterSummary
from phalanx_api.wire import HTTP_WRONG_VERSION, PROTOCOL_VERSION
from phalanx_operator.decide.state.fleet import Fleet, RouterAnswer, merge
from phalanx_operator.kube.client import SECRETS, KubeClient, KubeError
from phalanx_operator.kube.store import Key
from phalanx_operator.render import objects as names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollTiming:
    """Timing of polls, in seconds."""

    slack_s: float = 10.0
    """Time beyond the poll's duration after which a router counts as unreachable."""
    stale_s: float = 45.0
    """Age at which a summary is ignored."""
    pause_s: float = 0.2
    """Shortest pause between two polls."""
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    most_bytes: int = 16 << 20
    """Largest response."""


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """One router to poll: its pod's UID, and host:port."""

    uid: str
    address: str


class Routers(Protocol):
    """The routers as reconciles use them."""

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """Returns what these routers of a service report. A router that was not polled yet counts as polled and silent."""
        ...

    def tell(self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, hear_s: float) -> None:
        """Polls exactly these routers with this policy from now on. A poll lasts at most `hear_s`."""
        ...

    def forget(self, key: Key) -> None:
        """Ends the polls of this service."""
        ...


class RouterRefused(Exception):
    """A response without a valid summary. `is_mute`: the router has no such path; `is_unknown`: another protocol version."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.is_mute = status == 404
        self.is_unknown = status == HTTP_WRONG_VERSION
        self.is_denied = status in (401, 403)


@dataclass(slots=True, kw_only=True)
class _Service:
    policy: BalancePolicy
    hear_s: float
    routers: dict[str, "_Router"] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    token: str | None = None


@dataclass(slots=True, kw_only=True)
class _Router:
    target: RouterTarget
    first_asked: float
    task: "asyncio.Task[None] | None" = None
    summary: RouterSummary | None = None
    heard_at: float = 0.0
    is_mute: bool = False
    is_unknown: bool = False
    was_asked: bool = False
    """At least one poll has ended, with or without a response."""
    is_silent: bool = False
    """The last poll had no response: the router was unreachable, or a new policy ended the poll."""


class RouterPoller:
    """`Routers` over HTTP. `wake` receives each service whose routers' urgent state changed. Used by one event loop."""

    def __init__(
        self,
        client: KubeClient,
        http: aiohttp.ClientSession,
        wake: Callable[[Key], None],
        pace: PollTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._http = http
        self._wake = wake
        self._pace = pace or PollTiming()
        self._clock = clock
        self._draw = draw
        self._services: dict[Key, _Service] = {}

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        """See Routers."""
        service = self._services.get(key)
        known = service.routers if service else {}
        mute = sum(target.uid in known and known[target.uid].is_mute for target in targets)
        asked = [known[target.uid] for target in targets if target.uid in known]
        now = self._clock()
        is_new = bool(targets) and not any(self._had_its_time(router, now) for router in asked)
        heard = [
            RouterAnswer(r.target.uid, now - r.heard_at, r.summary) for r in asked if r.summary is not None and not r.is_mute
        ]
        fleet = merge(heard, len(targets) - mute, self._pace.stale_s)
        why = f"its summary version is not {PROTOCOL_VERSION}"
        unknown = [f"router {r.target.address}: {why}" for r in asked if r.is_unknown]
        return replace(fleet, unknown_versions=(*unknown, *fleet.unknown_versions), is_new=is_new) if unknown or is_new else fleet

    def tell(self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, hear_s: float) -> None:
        """See Routers."""
        service = self._services.setdefault(key, _Service(policy=policy, hear_s=hear_s))
        wanted = {target.uid: target for target in targets}
        for uid, router in list(service.routers.items()):
            if wanted.get(uid) != router.target:
                self._drop(service, uid)
        if (policy, hear_s) != (service.policy, service.hear_s):
            service.policy, service.hear_s = policy, hear_s
            service.changed.set()
            service.changed = asyncio.Event()
        for uid, target in wanted.items():
            if uid not in service.routers:
                router = service.routers[uid] = _Router(target=target, first_asked=self._clock())
                router.task = asyncio.get_running_loop().create_task(self._ask_on(key, service, router))

    def forget(self, key: Key) -> None:
        """See Routers."""
        if service := self._services.pop(key, None):
            for uid in list(service.routers):
                self._drop(service, uid)

    async def close(self) -> None:
        """Ends all polls."""
        tasks = [router.task for service in self._services.values() for router in service.routers.values() if router.task]
        for key in list(self._services):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _had_its_time(self, router: _Router, now: float) -> bool:
        """Returns whether its first poll has ended, or could have: a policy that keeps changing may end each poll early."""
        return router.was_asked or now - router.first_asked >= self._pace.slack_s

    def _drop(self, service: _Service, uid: str) -> None:
        task = service.routers.pop(uid).task
        if task is not None:
            task.cancel()

    async def _ask_on(self, key: Key, service: _Service, router: _Router) -> None:
        """Polls one router until it is dropped."""
        failures, pace = 0, self._pace
        while True:
            try:
                await self._ask_once(key, service, router)
                failures = 0
                await asyncio.sleep(pace.pause_s)
                continue
            except RouterRefused as error:
                why = str(error)
                router.is_mute = error.is_mute
                if error.is_unknown and not router.is_unknown:
                    router.is_unknown, router.summary = True, None
                    self._wake(key)
                service.token = None if error.is_denied else service.token
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, binascii.Error, KubeError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # a bug here must neither end the polls nor the operator
                log.critical("poll failed", extra={"service": "/".join(key)}, exc_info=error)
                why = type(error).__name__
            level = logging.WARNING if failures == 0 else logging.DEBUG
            log.log(level, "router unreachable", extra={"service": "/".join(key), "router": router.target.address, "why": why})
            wait_s = pace.first_retry_s * 2.0 ** min(failures, 10) if not router.is_mute else pace.last_retry_s
            failures, router.is_silent = failures + 1, True
            if not router.was_asked:
                router.was_asked = True
                self._wake(key)
            await asyncio.sleep(min(wait_s, pace.last_retry_s) * (0.5 + 0.5 * self._draw()))

    async def _ask_once(self, key: Key, service: _Service, router: _Router) -> None:
        """Makes one poll; a policy change ends it without a response."""
        changed = service.changed
        if service.token is None:
            service.token = await self._read_token(key)
        poll = asyncio.ensure_future(self._poll(service, router))
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
            return  # a new policy: poll again
        summary = poll.result()
        former, router.summary = router.summary, summary
        router.heard_at, router.is_mute, router.is_unknown = self._clock(), False, False
        router.was_asked, router.is_silent = True, False
        if former is None or _matters(former) != _matters(summary):
            self._wake(key)

    async def _poll(self, service: _Service, router: _Router) -> RouterSummary:
        """Returns the router's summary. Raises RouterRefused, and the errors of aiohttp and msgspec."""
        is_news = router.summary is None or router.is_silent  # the stored summary may be as old as one poll
        wait_s = 0.0 if is_news else service.hear_s
        headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
        async with self._http.post(
            f"http://{router.target.address}{SUMMARY_PATH}",
            data=msgspec.json.encode(Asked(service.policy, wait_s)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=wait_s + self._pace.slack_s, sock_connect=5.0),
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise RouterRefused(response.status)
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._pace.most_bytes:
                    raise RouterRefused(response.status)
        summary = msgspec.json.decode(body, type=RouterSummary)
        if summary.version != PROTOCOL_VERSION:
            raise RouterRefused(HTTP_WRONG_VERSION)
        return summary

    async def _read_token(self, key: Key) -> str:
        """Returns the service's token. Raises KubeError; binascii.Error if it is not base64."""
        secret = await self._client.get(SECRETS, key[0], names.token_secret(key[1]))
        return (
            base64.b64decode((secret.get("data") or {}).get("token", ""), validate=True).decode("ascii", errors="replace").strip()
        )


def _matters(summary: RouterSummary) -> object:
    """Returns the urgent part of a summary: states that start or end, not values that rise and fall."""
    hot = tuple(sorted((hotspot.group, hotspot.cause, hotspot.action) for hotspot in summary.hotspots))
    unknown = tuple(sorted(one.group for one in summary.unknown_versions))
    told = ((one.group, one.state == "dead", one.deaths, one.excused, one.draft_lost) for one in summary.groups)
    return hot, summary.fleet_saturated, tuple(sorted(summary.emptied)), summary.held > 0, unknown, tuple(sorted(told))


def address_of(ip: str) -> str:
    """Returns the address of the router pod with this IP."""
    return f"[{ip}]:{labels.HTTP_PORT}" if ":" in ip else f"{ip}:{labels.HTTP_PORT}"
