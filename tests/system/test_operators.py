"""Two real operators over one API server in memory: one leads, the other takes over when it ends."""

import asyncio
import json
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.frame.programs import free_port
from phalanx_operator.settings import Settings
from tests.control.builders import make_body
from tests.control.fake_api import FakeApi
from tests.polling import LIMIT_S, until

pytestmark = pytest.mark.system
ROOT = pathlib.Path(__file__).parents[2]
LEASE = "phalanx-operator"


class Operator:
    """One operator process."""

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
        """Samples by name, summed over labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.get("/metrics"))[1]):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def watch_age(self, kind: str) -> float:
        """Reported seconds since the last event of a kind."""
        prefix = f'phalanx_operator_watch_age_seconds{{kind="{kind}"}} '
        (line,) = [line for line in (await self.get("/metrics"))[1].splitlines() if line.startswith(prefix)]
        return float(line.removeprefix(prefix))

    async def end(self, number: signal.Signals) -> int:
        """Sends a signal; returns the exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


@pytest.fixture
async def server() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    await api.start()
    yield api
    await api.stop()


@pytest.fixture
def kubeconfig(server: FakeApi, tmp_path: pathlib.Path) -> pathlib.Path:
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
    return path


@pytest.fixture
async def operators(server: FakeApi, kubeconfig: pathlib.Path, request: pytest.FixtureRequest) -> AsyncIterator[list[Operator]]:
    """Two ready operators; the first one leads. A parameter replaces the flags of a short lease."""
    server.put("inferenceservices", make_body())
    flags: tuple[str, ...] = getattr(request, "param", ("--lease-seconds", "8"))
    started = [Operator(name, kubeconfig, flags) for name in ("first", "second")]
    try:
        for operator in started:
            await operator.start()
            await until(operator.is_ready)
            await until(lambda: holder(server) == "first")
        yield started
    finally:
        for operator in started:
            await operator.end(signal.SIGKILL)


async def test_denied_namespace_keeps_no_other_from_being_watched(server: FakeApi, kubeconfig: pathlib.Path) -> None:
    """A tenant may delete the namespace, or the RoleBinding in it."""
    server.denied |= {"former", "namespaces"}
    server.put("inferenceservices", make_body())
    operator = await Operator("first", kubeconfig, ("--namespace", "former", "team")).start()
    try:
        await until(lambda: len(server.of("statefulsets")) == 1)
        assert await operator.is_ready()
        server.denied.clear()
        assert operator.process is not None
        async with asyncio.timeout(LIMIT_S):
            assert await operator.process.wait() == 0, "it is started again, and watches both"
    finally:
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
    existing = set(server.of("statefulsets"))
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    assert holder(server) == "second" and existing < set(server.of("statefulsets"))
    assert server.of("leases")[LEASE]["spec"]["leaseTransitions"] == 2
    async with asyncio.timeout(LIMIT_S):
        while (acting := await second.metrics())["phalanx_operator_status_writes_total"] < 1:  # after the group is created
            await asyncio.sleep(0.05)
    assert acting["phalanx_operator_is_leader"] == 1 and acting["phalanx_operator_actions_total"] >= 1
    assert acting["phalanx_operator_api_calls_total"] > 0
    assert acting["process_resident_memory_bytes"] > 0
    assert second.process is not None
    filter_file = pathlib.Path(f"/proc/{second.process.pid}/coredump_filter")
    assert filter_file.read_text().strip() == "00000000", "dumps have no memory"
    assert re.search(r"Max core file size +[01] ", filter_file.with_name("limits").read_text())


async def test_watch_age_grows_only_while_its_kind_is_silent(server: FakeApi, operators: list[Operator]) -> None:
    leader = operators[0]
    before = await leader.watch_age("pods")
    async with asyncio.timeout(LIMIT_S):
        while (silent := await leader.watch_age("pods")) <= before + 1:
            await asyncio.sleep(0.05)
        server.put("pods", {"metadata": {"name": "p", "namespace": "team", "labels": {}}, "spec": {}, "status": {}})
        while await leader.watch_age("pods") >= silent:
            await asyncio.sleep(0.05)
        while await leader.watch_age("nodes") <= silent:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("operators", [()], ids=["as installed"], indirect=True)
async def test_killed_leader_is_replaced_after_its_lease(server: FakeApi, operators: list[Operator]) -> None:
    """With default times; tests/control/kube/test_lease.py shows that they add up to less than 10 s."""
    first = operators[0]
    await until(lambda: len(server.of("statefulsets")) == 1)
    await first.end(signal.SIGKILL)
    killed = time.monotonic()
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    print(f"acted on {time.monotonic() - killed:.1f} s after the leader was killed")
    lease = server.of("leases")[LEASE]["spec"]
    assert (holder(server), lease["leaseTransitions"]) == ("second", 2), "no other operator led in between"
    assert lease["leaseDurationSeconds"] == Settings(runtime_image="r", router_image="o").lease_seconds


@pytest.mark.parametrize("operators", [("--lease-seconds", "64")], ids=["lease longer than the limit"], indirect=True)
async def test_terminated_leader_hands_over_at_once(server: FakeApi, operators: list[Operator]) -> None:
    first = operators[0]
    await until(lambda: len(server.of("statefulsets")) == 1)
    assert await first.end(signal.SIGTERM) == 0
    await until(lambda: holder(server) == "second")
    scale(server, 2)
    await until(lambda: len(server.of("statefulsets")) == 2)
    deletions = [write for write in server.writes if write[0] == "DELETE" and write[1][0] == "statefulsets"]
    assert deletions == [], "the existing group stays"
