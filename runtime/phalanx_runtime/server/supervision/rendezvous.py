"""Rendezvous: one TCP connection from each pod to the leader's supervisor."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Sequence

from phalanx_api import labels
from phalanx_api.wire import NO_POWER, PROTOCOL_VERSION, DeclaredAdapter, DevicePower, DeviceProblem
from phalanx_frontend.tls import Certificate, client_arguments
from phalanx_runtime.server.supervision import incarnation as inc
from phalanx_runtime.server.supervision.rendezvous_wire import (
    DEFAULT_TIMING,
    AdapterFetched,
    Challenge,
    Command,
    Connection,
    Devices,
    Failed,
    FetchAdapter,
    GroupTokens,
    Join,
    JoinRefused,
    Leaving,
    Ready,
    Report,
    Serve,
    Start,
    Stop,
    Timing,
    Welcome,
    prove,
)

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0


class LeaderRendezvous:
    """Turns frames of authenticated pods into events."""

    def __init__(
        self,
        tokens: GroupTokens,
        num_pods: int,
        on_event: Callable[[inc.Event], None],
        timing: Timing = DEFAULT_TIMING,
        certificate: Certificate | None = None,
    ) -> None:
        self._tokens = tokens
        self._num_pods = num_pods
        self._on_event = on_event
        self._timing = timing
        self._certificate = certificate
        self._pods: dict[int, Connection] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_fetches = 0
        self._fetches: dict[tuple[int, int], asyncio.Future[str]] = {}  # by pod and number of the order
        self.own_host: str | None = None
        """Own address, as reached by pods."""

    @property
    def pods(self) -> dict[int, Connection]:
        """Connections of the joined pods."""
        return dict(self._pods)

    async def listen(self, host: str | None, port: int) -> int:
        """Returns the port; 0 selects a free one. Raises OSError."""
        context = None if self._certificate is None else self._certificate.context
        self._server = await asyncio.start_server(self._serve, host, port, ssl=context)
        return int(self._server.sockets[0].getsockname()[1])

    def send(self, command: Command) -> None:
        """Sends a command to all pods."""
        for connection in self._pods.values():
            connection.send(command)

    async def fetch_adapter(self, adapter: DeclaredAdapter) -> str:
        """Has all pods download an adapter. Returns why one of them has not; empty: all have it."""
        self._num_fetches += 1
        number, loop = self._num_fetches, asyncio.get_running_loop()
        fetches = {(pod, number): loop.create_future() for pod in self._pods}
        self._fetches |= fetches
        self.send(FetchAdapter(number, adapter))
        try:
            reasons = await asyncio.gather(*fetches.values())
        finally:
            for key in fetches:
                del self._fetches[key]
        return next((reason for reason in reasons if reason), "")

    def _end_fetch(self, pod: int, why: str, number: int | None = None) -> None:
        """Ends the fetch of a pod with this number, or all of them."""
        for (fetching, order), fetch in self._fetches.items():
            if fetching == pod and number in (None, order) and not fetch.done():
                fetch.set_result(f"pod {pod}: {why}" if why else "")

    async def close(self) -> None:
        """Closes all connections; no event follows."""
        self._on_event = _ignore
        if self._server is not None:
            self._server.close()
        await _settle()  # accepts connections
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _settle()  # closes sockets

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task"
        self._tasks.add(task)
        connection = Connection(reader, writer, self._timing)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                pod = await self._authenticate(connection)
            await self._receive_events(pod, connection)
        except (JoinRefused, ConnectionError, TimeoutError) as error:
            log.warning("pod rejected", extra={"peer": connection.peer_host, "why": str(error)})
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            self._tasks.discard(task)
            connection.close()

    async def _authenticate(self, connection: Connection) -> int:
        """Index of the pod. Raises JoinRefused or ConnectionError."""
        if self._certificate is not None and (role := connection.peer_role) != labels.GROUP_ROLE:
            raise JoinRefused(f"its certificate is of the role {role or 'without a name'}")
        nonce = secrets.token_bytes(32)
        connection.send(Challenge(PROTOCOL_VERSION, nonce))
        join = await connection.receive()
        if not isinstance(join, Join):
            raise JoinRefused(f"expected Join, got {type(join).__name__}")
        token = _proven(self._tokens(), join.proof, f"pod {join.pod}", nonce, join.nonce)
        if token is None:
            raise self._refuse(connection, "the service token is wrong")
        mismatch = self._mismatch(join)
        if mismatch:
            raise self._refuse(connection, mismatch)
        connection.send(Welcome(prove(token, "leader", join.nonce, nonce)))
        return join.pod

    def _refuse(self, connection: Connection, why: str) -> JoinRefused:
        connection.send(Welcome(b"", why))
        return JoinRefused(why)

    def _mismatch(self, join: Join) -> str:
        if join.version != PROTOCOL_VERSION:
            return f"the leader supports rendezvous version {PROTOCOL_VERSION}, pod {join.pod} version {join.version}"
        if join.num_pods != self._num_pods or not 0 < join.pod < self._num_pods:
            return f"the leader has {self._num_pods} pods, pod {join.pod} expects {join.num_pods}"
        return ""

    async def _receive_events(self, pod: int, connection: Connection) -> None:
        self.own_host = connection.own_host
        self._pods[pod] = connection
        ping = asyncio.create_task(connection.keep_alive())
        why = "the supervisor is closing"
        try:
            self._on_event(inc.Joined(pod, connection.peer_host))
            while True:
                match await connection.receive():
                    case Ready(number, memory):
                        self._on_event(inc.RanksReady(pod, number, tuple(memory)))
                    case Failed(number, text, is_echo, is_draft):
                        self._on_event(inc.RanksFailed(pod=pod, incarnation=number, why=text, is_echo=is_echo, is_draft=is_draft))
                    case Leaving(why_leaving):
                        self._on_event(inc.PodLeaving(pod, why_leaving))
                    case Devices(problems, power, energy_j):
                        self._on_event(inc.DevicesReported(pod, tuple(problems), power, energy_j))
                    case AdapterFetched(order, reason):
                        self._end_fetch(pod, reason, order)
                    case frame:
                        raise ConnectionError(f"unexpected {type(frame).__name__}")
        except ConnectionError as error:
            why = str(error)
        finally:
            ping.cancel()
            if self._pods.get(pod) is connection:
                del self._pods[pod]
                self._end_fetch(pod, why)
                self._on_event(inc.Left(pod, why))


class WorkerRendezvous:
    """Executes the leader's commands and sends reports."""

    def __init__(
        self,
        tokens: GroupTokens,
        pod: int,
        num_pods: int,
        execute: Callable[[Command], None],
        *,
        timing: Timing = DEFAULT_TIMING,
        certificate: Certificate | None = None,
    ) -> None:
        self._tokens = tokens
        self._pod = pod
        self._num_pods = num_pods
        self._execute = execute
        self._timing = timing
        self._certificate = certificate
        self._connection: Connection | None = None
        self._leaving: Leaving | None = None
        self._devices = Devices([])

    def report_devices(
        self, problems: Sequence[DeviceProblem], power: DevicePower = NO_POWER, energy_j: float | None = None
    ) -> None:
        """Reports problems, power and energy of the devices to this and any later leader."""
        self._devices = Devices(list(problems), power, energy_j)
        self.send(self._devices)

    def announce_leaving(self, why: str) -> None:
        """Reports the end of this pod to this and any later leader."""
        self._leaving = Leaving(why)
        self.send(self._leaving)

    def send(self, frame: Report) -> None:
        """Sends a frame if connected; a later leader starts a new incarnation."""
        if self._connection is not None:
            self._connection.send(frame)

    async def run(self, host: str, port: int, disconnected: Callable[[str], None]) -> None:
        """Reconnects until cancelled. `disconnected` gets the reason of each loss."""
        retry_s = self._timing.first_retry_s
        while True:
            try:
                tls = client_arguments(self._certificate, labels.GROUP_ROLE)
                async with asyncio.timeout(HANDSHAKE_S):
                    connection = Connection(*await asyncio.open_connection(host, port, **tls), self._timing)
                why = await self._serve(connection)
                retry_s = self._timing.first_retry_s
            except (OSError, TimeoutError, JoinRefused) as error:
                why = str(error) or type(error).__name__
            disconnected(f"leader {host}:{port}: {why}")
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, self._timing.max_retry_s)

    async def _serve(self, connection: Connection) -> str:
        """Reason the connection ended."""
        ping = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._join(connection)
            self._connection = connection
            if self._leaving is not None:
                self.send(self._leaving)
            if self._devices != Devices([]):
                self.send(self._devices)
            ping = asyncio.create_task(connection.keep_alive())
            while True:
                match await self._receive_command(connection):
                    case str() as why:
                        return why
                    case command:
                        self._execute(command)
        finally:
            self._connection = None
            if ping is not None:
                ping.cancel()
            connection.close()

    async def _receive_command(self, connection: Connection) -> Command | str:
        """The next command, or the reason for the end."""
        try:
            match await connection.receive():
                case Start() | Serve() | Stop() | FetchAdapter() as command:
                    return command
                case frame:
                    return f"unexpected {type(frame).__name__}"
        except ConnectionError as error:
            return str(error)

    async def _join(self, connection: Connection) -> None:
        challenge = await connection.receive()
        if not isinstance(challenge, Challenge):
            raise JoinRefused(f"expected Challenge, got {type(challenge).__name__}")
        nonce = secrets.token_bytes(32)
        token = self._tokens()[0]
        proof = prove(token, f"pod {self._pod}", challenge.nonce, nonce)
        connection.send(Join(version=PROTOCOL_VERSION, pod=self._pod, num_pods=self._num_pods, nonce=nonce, proof=proof))
        welcome = await connection.receive()
        if not isinstance(welcome, Welcome):
            raise JoinRefused(f"expected Welcome, got {type(welcome).__name__}")
        if welcome.refused:
            raise JoinRefused(welcome.refused)
        if not hmac.compare_digest(welcome.proof, prove(token, "leader", nonce, challenge.nonce)):
            raise JoinRefused("the leader does not prove the service token")


def _proven(tokens: Sequence[str], proof: bytes, role: str, *nonces: bytes) -> str | None:
    """The token that the other side proves."""
    return next((token for token in tokens if hmac.compare_digest(proof, prove(token, role, *nonces))), None)


async def _settle() -> None:
    """Runs ready callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)


def _ignore(event: inc.Event) -> None:
    pass
