"""Asks the routers of every service for their summaries, and tells them the policy: one long poll for each router.

A router answers when something begins or ends, else when the time is over. A new policy ends the poll at once and asks anew. A
router that cannot be reached is asked less and less often, up to once a minute. What was heard is kept until its router is gone.
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
from phalanx_api.wire.versions import HTTP_WRONG_VERSION, SUMMARY
from phalanx_operator.decide.state.fleet import Fleet, Heard, merge
from phalanx_operator.kube.client import SECRETS, KubeClient, KubeError
from phalanx_operator.kube.store import Key
from phalanx_operator.render import objects as names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How routers are asked. Seconds.

    slack_s: how much longer a router may take than it may keep a question before it counts as away. stale_s: after that what it
    said counts no more. pause_s: between two polls, however quickly it answers. most_bytes: of an answer.
    """

    slack_s: float = 10.0
    stale_s: float = 45.0
    pause_s: float = 0.2
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    most_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One router to ask: its pod's UID, and host:port."""

    uid: str
    address: str


class Routers(Protocol):
    """What looks at services know of routers."""

    def fleet(self, key: Key, targets: Sequence[Target]) -> Fleet:
        """What these routers of a service say. One that was not asked yet counts as asked, and has not answered."""
        ...

    def tell(self, key: Key, targets: Sequence[Target], policy: BalancePolicy, hear_s: float) -> None:
        """Asks these routers from now on, and no others, with this policy; each keeps a question for `hear_s` at most."""
        ...

    def forget(self, key: Key) -> None:
        """Asks no router of this service any more."""
        ...


class Refused(Exception):
    """A router answered, and with no summary that we know. `is_mute`: it has no such door; `is_unknown`: no version in common."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.is_mute = status == 404
        self.is_unknown = status == HTTP_WRONG_VERSION
        self.is_denied = status in (401, 403)


@dataclass(slots=True)
class _Service:
    policy: BalancePolicy
    hear_s: float
    routers: dict[str, "_Router"] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    token: str | None = None


@dataclass(slots=True)
class _Router:
    target: Target
    first_asked: float
    task: "asyncio.Task[None] | None" = None
    summary: RouterSummary | None = None
    heard_at: float = 0.0
    is_mute: bool = False
    is_unknown: bool = False
    was_asked: bool = False
    """It answered, or did not, at least once."""
    is_silent: bool = False
    """Its last question brought no answer: it did not come, or a new policy ended the question."""


class Asking:
    """Implements `Routers` over HTTP. `wake` is told each service of whose routers there is news. Belongs to one event loop."""

    def __init__(
        self,
        client: KubeClient,
        http: aiohttp.ClientSession,
        wake: Callable[[Key], None],
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._http = http
        self._wake = wake
        self._pace = pace or Pace()
        self._clock = clock
        self._draw = draw
        self._services: dict[Key, _Service] = {}

    def fleet(self, key: Key, targets: Sequence[Target]) -> Fleet:
        """See Routers."""
        service = self._services.get(key)
        known = service.routers if service else {}
        mute = sum(target.uid in known and known[target.uid].is_mute for target in targets)
        asked = [known[target.uid] for target in targets if target.uid in known]
        now = self._clock()
        is_new = bool(targets) and not any(self._had_its_time(router, now) for router in asked)
        heard = [Heard(r.target.uid, now - r.heard_at, r.summary) for r in asked if r.summary is not None and not r.is_mute]
        fleet = merge(heard, len(targets) - mute, self._pace.stale_s)
        unknown = [f"router {r.target.address}: it speaks no version of summaries of {SUMMARY}" for r in asked if r.is_unknown]
        return replace(fleet, unknown_versions=(*unknown, *fleet.unknown_versions), is_new=is_new) if unknown or is_new else fleet

    def tell(self, key: Key, targets: Sequence[Target], policy: BalancePolicy, hear_s: float) -> None:
        """See Routers."""
        service = self._services.setdefault(key, _Service(policy, hear_s))
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
                router = service.routers[uid] = _Router(target, self._clock())
                router.task = asyncio.get_running_loop().create_task(self._ask_on(key, service, router))

    def forget(self, key: Key) -> None:
        """See Routers."""
        if service := self._services.pop(key, None):
            for uid in list(service.routers):
                self._drop(service, uid)

    async def close(self) -> None:
        """Asks nobody any more."""
        tasks = [router.task for service in self._services.values() for router in service.routers.values() if router.task]
        for key in list(self._services):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _had_its_time(self, router: _Router, now: float) -> bool:
        """Whether it answered, or did not, or could have by now: a policy that keeps changing may end each poll before that."""
        return router.was_asked or now - router.first_asked >= self._pace.slack_s

    def _drop(self, service: _Service, uid: str) -> None:
        task = service.routers.pop(uid).task
        if task is not None:
            task.cancel()

    async def _ask_on(self, key: Key, service: _Service, router: _Router) -> None:
        """Asks one router until it is dropped."""
        failures, pace = 0, self._pace
        while True:
            try:
                await self._ask_once(key, service, router)
                failures = 0
                await asyncio.sleep(pace.pause_s)
                continue
            except Refused as error:
                why = str(error)
                router.is_mute = error.is_mute
                if error.is_unknown and not router.is_unknown:
                    router.is_unknown, router.summary = True, None
                    self._wake(key)
                service.token = None if error.is_denied else service.token
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, binascii.Error, KubeError) as error:
                why = str(error) or type(error).__name__
            except Exception as error:  # a bug here must not leave a router unasked, nor end the operator
                log.critical("asking failed", extra={"service": "/".join(key)}, exc_info=error)
                why = type(error).__name__
            level = logging.WARNING if failures == 0 else logging.DEBUG
            log.log(level, "router not heard", extra={"service": "/".join(key), "router": router.target.address, "why": why})
            wait_s = pace.first_retry_s * 2.0 ** min(failures, 10) if not router.is_mute else pace.last_retry_s
            failures, router.is_silent = failures + 1, True
            if not router.was_asked:
                router.was_asked = True
                self._wake(key)
            await asyncio.sleep(min(wait_s, pace.last_retry_s) * (0.5 + 0.5 * self._draw()))

    async def _ask_once(self, key: Key, service: _Service, router: _Router) -> None:
        """One poll; a policy that changes meanwhile ends it without an answer."""
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
            return  # a new policy: ask again
        summary = poll.result()
        former, router.summary = router.summary, summary
        router.heard_at, router.is_mute, router.is_unknown = self._clock(), False, False
        router.was_asked, router.is_silent = True, False
        if former is None or _matters(former) != _matters(summary):
            self._wake(key)

    async def _poll(self, service: _Service, router: _Router) -> RouterSummary:
        """The router's answer. Raises: Refused, and what aiohttp and msgspec raise."""
        is_news = router.summary is None or router.is_silent  # what was heard may be as old as a question may be kept
        wait_s = 0.0 if is_news else service.hear_s
        headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
        async with self._http.post(
            f"http://{router.target.address}{SUMMARY_PATH}",
            data=msgspec.json.encode(Asked(service.policy, wait_s, SUMMARY.newest, SUMMARY.oldest)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=wait_s + self._pace.slack_s, sock_connect=5.0),
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise Refused(response.status)
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._pace.most_bytes:
                    raise Refused(response.status)
        summary = msgspec.json.decode(body, type=RouterSummary)
        if summary.version not in SUMMARY:
            raise Refused(HTTP_WRONG_VERSION)
        return summary

    async def _read_token(self, key: Key) -> str:
        """The service's token. Raises: a KubeError; binascii.Error when it is no base64."""
        secret = await self._client.get(SECRETS, key[0], names.token_secret(key[1]))
        return (
            base64.b64decode((secret.get("data") or {}).get("token", ""), validate=True).decode("ascii", errors="replace").strip()
        )


def _matters(summary: RouterSummary) -> object:
    """What a look must follow at once: what begins and ends, not what goes up and down."""
    hot = tuple(sorted((hotspot.group, hotspot.cause, hotspot.action) for hotspot in summary.hotspots))
    unknown = tuple(sorted(one.group for one in summary.unknown_versions))
    told = ((one.group, one.state == "dead", one.deaths, one.excused, one.draft_lost) for one in summary.groups)
    return hot, summary.fleet_saturated, tuple(sorted(summary.emptied)), summary.held > 0, unknown, tuple(sorted(told))


def address_of(ip: str) -> str:
    """Where a router's pod with this address listens."""
    return f"[{ip}]:{labels.HTTP_PORT}" if ":" in ip else f"{ip}:{labels.HTTP_PORT}"
