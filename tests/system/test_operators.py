"""Two real operators over one API server in memory: one acts, the other one follows it when it dies or leaves."""

import asyncio
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx_operator.settings import Settings
from tests.control.builders import make_body
from tests.control.fake_api import FakeApi

pytestmark = pytest.mark.system
ROOT = pathlib.Path(__file__).parents[2]
LEASE = "phalanx-operator"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Operator:
    """One operator as a process of its own."""

    def __init__(self, name: str, kubeconfig: pathlib.Path, flags: tuple[str, ...]) -> None:
        self.name = name
        self._flags = flags
        self.port = free_port()
        self._kubeconfig = kubeconfig
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> "Operator":
        images = {"PHALANX_RUNTIME_IMAGE": "runtime:1", "PHALANX_ROUTER_IMAGE": "router:1"}
        path = {"PYTHONPATH": ":".join(str(ROOT / part) for part in ("crds", "operator"))}
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "phalanx_operator", "run", "--port", str(self.port), *self._flags),
            env=os.environ | images | path | {"KUBECONFIG": str(self._kubeconfig), "POD_NAME": self.name},
        )
        return self

    async def get(self, path: str) -> tuple[int, str]:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{self.port}{path}") as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def is_ready(self) -> bool:
        return (await self.get("/readyz"))[0] == 200

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name; of several with labels the sum."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.get("/metrics"))[1]):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def watch_age(self, kind: str) -> float:
        """For how long it says that it heard nothing of a kind."""
        wanted = f'phalanx_operator_watch_age_seconds{{kind="{kind}"}} '
        (line,) = [line for line in (await self.get("/metrics"))[1].splitlines() if line.startswith(wanted)]
        return float(line.removeprefix(wanted))

    async def end(self, number: signal.Signals) -> int:
        """Its exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


async def until(condition: Callable[[], object], limit_s: float = 30) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.fixture
async def server() -> AsyncIterator[FakeApi]:
    made = FakeApi()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def operators(server: FakeApi, tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> AsyncIterator[list[Operator]]:
    """Two of them, both ready; the first one leads. A test may ask for other flags than a short lease."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    server.put("inferenceservices", make_body())
    flags: tuple[str, ...] = getattr(request, "param", ("--lease-seconds", "3"))
    made = [Operator(name, path, flags) for name in ("first", "second")]
    try:
        for operator in made:
            await operator.start()
            async with asyncio.timeout(30):
                while not await operator.is_ready():
                    await asyncio.sleep(0.05)
            await until(lambda: holder(server) == "first")
        yield made
    finally:
        for operator in made:
            await operator.end(signal.SIGKILL)


def holder(server: FakeApi) -> str:
    lease = server.of("leases").get(LEASE)
    return str(lease["spec"]["holderIdentity"]) if lease else ""


def scale(server: FakeApi, replicas: int) -> None:
    body = server.of("inferenceservices")["chat"]
    server.put("inferenceservices", body | {"spec": body["spec"] | {"replicas": replicas}})


async def test_second_operator_takes_over_when_the_first_dies(server: FakeApi, operators: list[Operator]) -> None:
    first, second = operators
    await until(lambda: len(server.of("statefulsets")) == 1)
    assert (await first.metrics())["phalanx_operator_is_leader"] == 1
    standby = await second.metrics()
    assert standby["phalanx_operator_is_leader"] == 0 and standby["phalanx_operator_reconcile_seconds_count"] == 0
    await first.end(signal.SIGKILL)
    made = set(server.of("statefulsets"))
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    assert holder(server) == "second" and made < set(server.of("statefulsets"))
    assert server.of("leases")[LEASE]["spec"]["leaseTransitions"] == 2
    async with asyncio.timeout(10):
        while (acting := await second.metrics())["phalanx_operator_status_writes_total"] < 1:  # after the group was made
            await asyncio.sleep(0.05)
    assert acting["phalanx_operator_is_leader"] == 1 and acting["phalanx_operator_actions_total"] >= 1
    assert acting["phalanx_operator_api_calls_total"] > 0
    assert acting["process_resident_memory_bytes"] > 0


async def test_watch_age_grows_only_while_its_kind_is_silent(server: FakeApi, operators: list[Operator]) -> None:
    leader = operators[0]
    before = await leader.watch_age("pods")
    async with asyncio.timeout(30):
        while (silent := await leader.watch_age("pods")) <= before + 1:
            await asyncio.sleep(0.05)
        server.put("pods", {"metadata": {"name": "p", "namespace": "team", "labels": {}}, "spec": {}, "status": {}})
        while await leader.watch_age("pods") >= silent:
            await asyncio.sleep(0.05)
        while await leader.watch_age("nodes") <= silent:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("operators", [()], ids=["as installed"], indirect=True)
async def test_killed_leader_is_replaced_after_its_lease(server: FakeApi, operators: list[Operator]) -> None:
    """With the times that an operator has by itself; tests/control/kube/test_lease.py shows that they come to less than 10 s."""
    first = operators[0]
    await until(lambda: len(server.of("statefulsets")) == 1)
    await first.end(signal.SIGKILL)
    killed = time.monotonic()
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    print(f"acted on {time.monotonic() - killed:.1f} s after the leader was killed")
    lease = server.of("leases")[LEASE]["spec"]
    assert (holder(server), lease["leaseTransitions"]) == ("second", 2), "nobody else led meanwhile"
    assert lease["leaseDurationSeconds"] == Settings(runtime_image="r", router_image="o").lease_seconds


@pytest.mark.parametrize("operators", [("--lease-seconds", "120")], ids=["a lease that never runs out"], indirect=True)
async def test_a_leader_that_leaves_hands_over_at_once(server: FakeApi, operators: list[Operator]) -> None:
    first = operators[0]
    await until(lambda: len(server.of("statefulsets")) == 1)
    assert await first.end(signal.SIGTERM) == 0
    await until(lambda: holder(server) == "second")
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    deletions = [write for write in server.writes if write[0] == "DELETE" and write[1][0] == "statefulsets"]
    assert deletions == [], "the group that was there stays"
