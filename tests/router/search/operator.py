"""The operator in a virtual fleet: its real poller and its rule for drained groups. `planned` has the whole reconcile."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import aiohttp
from websockets.exceptions import ConnectionClosedError

from bench.virtual.execution import EPOCH_S
from bench.virtual.leader import TOKEN
from bench.virtual.net import Network, Process
from phalanx_api.summary import BalancePolicy, Mode
from phalanx_operator.decide.groups.drain import drained_reason
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup
from phalanx_operator.kube.client import KubeClient, Resource, Retry
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import RouterPoller, RouterTarget
from tests.control.search.api_server import FaultKind
from tests.router.search.calls import Call, decode_chunk, encode

SERVICE = ("team", "chat")
POLL_S, LOOK_S, DRAIN_TIMEOUT_S = 15.0, 2.0, 60.0
CONNECT_S = 5.0


class _Response:
    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.content = self
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


class _Http:
    """The part of `aiohttp.ClientSession` that polls use."""

    def __init__(self, net: Network, process: Process) -> None:
        self._dial = net.dial_from(process)

    @asynccontextmanager
    async def post(self, url: str, *, data: bytes, timeout: aiohttp.ClientTimeout, **options: Any) -> AsyncIterator[_Response]:
        address = url.removeprefix("http://").partition("/")[0]
        try:
            async with asyncio.timeout(timeout.total), self._dial(f"{address}/http", "", CONNECT_S, None) as socket:
                await socket.send(encode(Call("poll", body=data)))
                chunk = decode_chunk(await socket.recv())
        except (OSError, ConnectionClosedError) as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        yield _Response(chunk.status, chunk.body)


class _Secrets:
    """The API server's Secret with the service's token."""

    def __init__(self, can_read: Callable[[], bool]) -> None:
        self._can_read = can_read

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any]:
        if not self._can_read():
            raise Retry("no connection")
        return {"data": {"token": base64.b64encode(TOKEN.encode()).decode()}}


class _NoIdentity:
    async def context(self, key: Key) -> ssl.SSLContext:
        raise AssertionError("the service has no certificates")

    def forget(self, key: Key) -> None:
        """Does nothing."""


@dataclass(slots=True)
class DrainedGroup:
    """A group that drains since a time."""

    name: str
    since: float


def stamp(at: float) -> str:
    """Returns a time as Kubernetes writes it."""
    return datetime.fromtimestamp(EPOCH_S + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class OperatorProcess(Process):
    """One start of the operator. Constructed in its own execution."""

    def __init__(self, net: Network, draw: Callable[[], float], mode: Mode, coalesces: bool) -> None:
        super().__init__("operator")
        self._mode: Mode = mode
        self._coalesces = coalesces
        http = cast(aiohttp.ClientSession, _Http(net, self))
        self._cuts, self._api = net.cuts, Process("api")
        secrets = cast(KubeClient, _Secrets(lambda: self.api_fault() is None))
        clock = asyncio.get_running_loop().time
        self.on_wake: Callable[[], None] = lambda: None
        self.poller = RouterPoller(secrets, http, lambda key: self.on_wake(), _NoIdentity(), clock=clock, draw=draw)

    def api_fault(self) -> FaultKind | None:
        """Returns how its calls to the API server fail while it is cut off: before a write, or after it."""
        if self._cuts.is_cut(self, self._api):
            return "before"
        return "after" if self._cuts.is_cut(self._api, self) else None

    async def run(
        self, routers: Callable[[], list[RouterTarget]], draining: Callable[[], list[DrainedGroup]], delete: Callable[[str], None]
    ) -> None:
        """Publishes the policy, and deletes groups that have drained."""
        while True:
            targets, groups = routers(), draining()
            names = [group.name for group in groups]
            policy = BalancePolicy(
                number=1, mode=self._mode, routers=len(targets), evacuate=names, coalesce_requests=self._coalesces
            )
            self.poller.publish(SERVICE, targets, policy, POLL_S)
            fleet = self.poller.fleet(SERVICE, targets) if groups else Fleet()
            now = stamp(asyncio.get_running_loop().time()) if groups else ""
            for group in groups:
                mark = DrainMark(stamp(group.since), "the search drains it")
                observed = ObservedGroup(
                    name=group.name, uid=group.name, revision="r1", created=stamp(0.0), size=1, draining=mark
                )
                if drained_reason(observed, fleet, DRAIN_TIMEOUT_S, now):
                    delete(group.name)
            await asyncio.sleep(LOOK_S)
