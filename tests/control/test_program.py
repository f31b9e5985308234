"""Settings, command line, work loop, probes, log format and kopf handlers."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from bench.frame.programs import free_port
from phalanx_operator import __main__ as program
from phalanx_operator.kube.client import Conflict, Denied, Gone, KubeError, Rejected, Retry
from phalanx_operator.kube.store import Key
from phalanx_operator.logs import FieldFormatter
from phalanx_operator.loop import handlers
from phalanx_operator.loop.worker import COALESCE_S, MIN_INTERVAL_S, Loop
from phalanx_operator.metrics import Health, Metrics, make_app, serve
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.settings import BadSetting, Settings, read_settings

IMAGES = {"PHALANX_RUNTIME_IMAGE": "r:1", "PHALANX_ROUTER_IMAGE": "o:1"}


def test_settings_come_from_the_environment_or_flags() -> None:
    assert read_settings([], IMAGES) == Settings(runtime_image="r:1", router_image="o:1")
    environment = IMAGES | {"PHALANX_NAMESPACES": "a,b", "PHALANX_OPERATOR_PORT": "1", "POD_NAME": "p"}
    assert read_settings([], environment) == Settings(
        runtime_image="r:1", router_image="o:1", namespaces=("a", "b"), port=1, pod_name="p"
    )
    assert read_settings(["--prometheus-namespace", "m"], IMAGES) == Settings(
        runtime_image="r:1", router_image="o:1", prometheus_namespace="m"
    )
    assert read_settings([], IMAGES | {"PHALANX_LEASE_SECONDS": "20"}) == Settings(
        runtime_image="r:1", router_image="o:1", lease_seconds=20
    )
    for arguments, extra in ((["--console"], {}), ([], {"PHALANX_OPERATOR_CONSOLE": "true"})):
        assert read_settings(arguments, IMAGES | extra).console
    sources = ("minio.store", "*.corp", "10.0.0.0/8", "fd00::1")
    for arguments, extra in ((["--private-sources", *sources], {}), ([], {"PHALANX_PRIVATE_SOURCES": ",".join(sources)})):
        assert read_settings(arguments, IMAGES | extra).private_sources == sources
    for arguments, extra in ((["--image-pull-secrets", "a", "b.c"], {}), ([], {"PHALANX_IMAGE_PULL_SECRETS": "a, b.c,a"})):
        assert read_settings(arguments, IMAGES | extra).image_pull_secrets == ("a", "b.c")
    flags = ["--namespace", "c", "d", "--namespace", "e", "--runtime-image", "x", "--port", "0", "--workers", "2"]
    assert read_settings(flags, environment) == Settings(
        runtime_image="x", router_image="o:1", namespaces=("c", "d", "e"), port=0, workers=2, pod_name="p"
    )


def test_a_file_is_between_variables_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text("namespace: [a, b]\nport: 1\nworkers: 2\nconsole: true\n")
    environment = IMAGES | {"PHALANX_OPERATOR_WORKERS": "3", "PHALANX_LEASE_SECONDS": "20"}
    assert read_settings(["--config", str(file), "--port", "2"], environment) == Settings(
        runtime_image="r:1", router_image="o:1", namespaces=("a", "b"), port=2, workers=2, lease_seconds=20, console=True
    )
    assert read_settings(["--config", str(file), "--namespace", "c"], environment).namespaces == ("c",)
    file.write_text("prot: 1\n")
    with pytest.raises(SystemExit) as end:
        read_settings(["--config", str(file)], environment)
    assert end.value.code == 2 and f"--config {file}: prot is no flag of run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "PHALANX_RUNTIME_IMAGE is not set"),
        (["--port", "x"], IMAGES, "PHALANX_OPERATOR_PORT: 'x'"),
        (["--workers", "0"], IMAGES, "PHALANX_OPERATOR_WORKERS: '0'"),
        (["--lease-seconds", "2"], IMAGES, "PHALANX_LEASE_SECONDS: '2'"),
        ([], IMAGES | {"PHALANX_OPERATOR_CONSOLE": "yes"}, "PHALANX_OPERATOR_CONSOLE: 'yes'"),
        (["--prometheus-namespace", "A_b"], IMAGES, "PHALANX_PROMETHEUS_NAMESPACE: 'A_b'"),
        (["--namespace", "A_b"], IMAGES, "PHALANX_NAMESPACES: 'A_b'"),
        (["--image-pull-secrets", "A"], IMAGES, "PHALANX_IMAGE_PULL_SECRETS: 'A' is not the name of a Secret"),
        (["--private-sources", "https://store"], IMAGES, "PHALANX_PRIVATE_SOURCES: 'https://store'"),
        ([], IMAGES | {"PHALANX_PRIVATE_SOURCES": "10.0.0.0/33"}, "PHALANX_PRIVATE_SOURCES: '10.0.0.0/33'"),
    ],
)
def test_invalid_setting_is_named(arguments: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        read_settings(arguments, environment)


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "usage"), (["run", "--port", "x"], "PHALANX_"), (["run", "--nonsense"], "usage")]
)
def test_invalid_command_line_exits_with_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx-operator", *arguments])
    with pytest.raises(SystemExit) as exited:
        program.main()
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_crd_command_prints_the_crd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx-operator", "crd"])
    program.main()
    assert "kind: CustomResourceDefinition" in capsys.readouterr().out


def test_signal_during_import_exits_with_status_0() -> None:
    code = (
        "import signal, sys\n"
        "class Signal:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'phalanx_operator.settings': signal.raise_signal(signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Signal())\n"
        "sys.argv = ['phalanx-operator', 'run', '--port', 'x']\n"
        "from phalanx_operator.__main__ import main\n"
        "main()\n"
    )
    completed = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert (completed.returncode, completed.stderr) == (0, b""), "it exits before it parses the flag"


A, B = ("team", "a"), ("team", "b")


def make_loop(reconcile: Callable[[Key], Awaitable[float | None]]) -> tuple[Loop, list[tuple[Key, float]]]:
    """Returns a loop and the list of its wake-ups."""
    wakes: list[tuple[Key, float]] = []

    class RecordingLoop(Loop):
        def wake(self, key: Key, after_s: float = 0.0) -> None:
            wakes.append((key, after_s))
            super().wake(key, after_s)

    return RecordingLoop(reconcile, Metrics(), clock=lambda: 0.0, draw=lambda: 0.5), wakes


async def test_rapid_changes_are_batched_except_urgent_ones() -> None:
    now = 100.0

    async def reconcile(_: Key) -> float | None:
        return 600.0

    loop = Loop(reconcile, Metrics(), clock=lambda: now, draw=lambda: 0.5)
    await loop.run_once(A)
    due = loop.wakeups.next_due
    assert due() == 700.0
    now = 100.1
    loop.wake(A)
    assert due() == 100.0 + MIN_INTERVAL_S
    loop.wake(B)
    assert due() == now + COALESCE_S, "the interval is per service"
    loop.wake(A, after_s=0.0)
    assert due() == now
    now = 101.0
    assert {loop.wakeups.take(now), loop.wakeups.take(now)} == {A, B}
    loop.wakeups.done(A)
    loop.wake(A)
    assert due() == now + COALESCE_S, "the interval is over"


@pytest.mark.parametrize("error", [Conflict, Gone, Rejected, Denied, Retry, TimeoutError, ZeroDivisionError])
async def test_failing_reconcile_is_retried_with_backoff(error: type[Exception]) -> None:
    async def fail(_: Key) -> float | None:
        raise error("no")

    loop, wakes = make_loop(fail)
    for _ in range(3):
        await loop.run_once(A)
    assert wakes == [(A, 0.375), (A, 0.75), (A, 1.5)]


async def test_successful_reconcile_resets_failures_and_schedules_the_next() -> None:
    answers: list[Any] = [Retry("no"), 600.0, Retry("no"), None]

    async def reconcile(_: Key) -> float | None:
        answer = answers.pop(0)
        if isinstance(answer, KubeError):
            raise answer
        return float(answer) if answer else None

    loop, wakes = make_loop(reconcile)
    for _ in range(4):
        await loop.run_once(A)
    assert wakes == [(A, 0.375), (A, 600.0), (A, 0.375)]


async def test_workers_reconcile_woken_keys_never_twice_at_once() -> None:
    running: set[Key] = set()
    reconciled: list[Key] = []
    all_reconciled = asyncio.Event()

    async def reconcile(key: Key) -> float | None:
        assert key not in running
        running.add(key)
        reconciled.append(key)
        if reconciled.count(A) == 1:
            loop.wake(A, 0.0)
        for _ in range(5):
            await asyncio.sleep(0)
        running.discard(key)
        if reconciled.count(A) >= 2 and B in reconciled:
            all_reconciled.set()
        return None

    loop = Loop(reconcile, Metrics(), draw=lambda: 0.5)
    loop.wake(("team", ""), 0.0)
    task = asyncio.create_task(loop.work(3))
    await asyncio.sleep(0)
    loop.wake(A, 0.0)
    loop.wake(B, 0.001)
    async with asyncio.timeout(5):
        await all_reconciled.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ("team", "") not in reconciled


async def test_probes_report_health_readiness_and_metrics() -> None:
    health, metrics = Health(), Metrics()
    async with TestClient(TestServer(make_app(health, metrics))) as client:

        async def read(path: str) -> tuple[int, str]:
            async with client.get(path) as response:
                return response.status, await response.text()

        assert [await read("/healthz"), await read("/readyz")] == [(200, "ok"), (503, "starting")]
        health.ready = True
        health.stalls = lambda: ["no data of pods"]
        assert [await read("/healthz"), await read("/readyz")] == [(503, "no data of pods"), (200, "ok")]
        metrics.is_leader.set(1)
        assert "phalanx_operator_is_leader 1.0" in (await read("/metrics"))[1]


async def test_port_0_is_a_free_port() -> None:
    runner = await serve(make_app(Health(), Metrics()), 0)
    assert runner.addresses[0][1] > 0
    await runner.cleanup()


async def test_probes_are_answered_over_ipv4_and_ipv6() -> None:
    port = free_port()
    runner = await serve(make_app(Health(), Metrics()), port)
    async with ClientSession() as http:
        for host in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{host}:{port}/healthz") as response:
                assert response.status == 200, host
    await runner.cleanup()


def test_log_lines_contain_values_as_fields() -> None:
    record = logging.makeLogRecord({"msg": "group created", "group": "g", "why": "two words", "empty": "", "levelname": "INFO"})
    assert FieldFormatter("%(levelname)s %(message)s").format(record) == "INFO group created group=g why='two words'"


def test_kopf_only_watches() -> None:
    """Handlers of changes write annotations, handlers of deletions a finalizer."""
    handlers.silence_events()
    registry: Any = handlers.registry(lambda key: None, ServiceCache())
    assert registry._changing.get_all_handlers() == []
    assert [handler.fn.__name__ for handler in registry._watching.get_all_handlers()] == ["changed"]


async def _send_event(registry: Any, name: str, type: str | None, meta: dict[str, Any]) -> None:
    event = {"type": type, "object": {"metadata": meta | {"namespace": "team", "name": name}}}
    await registry._watching.get_all_handlers()[0].fn(namespace="team", name=name, type=type, event=event, meta=meta)


async def test_created_service_wakes_its_key() -> None:
    woken: list[Key] = []
    registry: Any = handlers.registry(woken.append, ServiceCache())
    meta = {"uid": "1", "generation": 1, "resourceVersion": "1"}
    await _send_event(registry, "a", "ADDED", meta)
    settings = kopf.OperatorSettings()
    startup, login = registry._activities.get_all_handlers()
    startup.fn(settings=settings)
    assert woken == [A]
    assert settings.posting.enabled is False
    assert settings.persistence.diffbase_storage.build(body=kopf.Body({})) == {}, "kopf copies no object"
    assert login.fn.__name__ == "log_in"


FIRST = {"uid": "1", "generation": 1, "resourceVersion": "1"}


@pytest.mark.parametrize(
    ("type", "meta", "is_woken"),
    [
        pytest.param("MODIFIED", FIRST | {"resourceVersion": "2"}, False, id="status"),
        pytest.param(None, FIRST | {"resourceVersion": "2"}, False, id="relisted"),
        pytest.param("MODIFIED", FIRST | {"generation": 2}, True, id="spec"),
        pytest.param("MODIFIED", FIRST | {"deletionTimestamp": "now"}, True, id="deletion requested"),
        pytest.param("MODIFIED", FIRST | {"uid": "2"}, True, id="recreated"),
        pytest.param("DELETED", FIRST, True, id="deleted"),
    ],
)
async def test_status_writes_wake_no_service(type: str | None, meta: dict[str, Any], is_woken: bool) -> None:
    woken: list[Key] = []
    registry: Any = handlers.registry(woken.append, ServiceCache())
    await _send_event(registry, "a", None, FIRST)
    await _send_event(registry, "b", None, FIRST)
    await _send_event(registry, "a", type, meta)
    assert woken == [A, ("team", "b"), *([A] if is_woken else [])]


async def test_watched_state_is_cached_until_the_service_is_deleted() -> None:
    services = ServiceCache()
    registry: Any = handlers.registry(lambda key: None, services)
    await _send_event(registry, "a", None, FIRST)
    await _send_event(registry, "b", "ADDED", FIRST)
    await _send_event(registry, "b", "MODIFIED", FIRST | {"resourceVersion": "2"})
    assert {key[1]: cached.version for key, cached in services.bodies.items()} == {"a": 1, "b": 2}
    await _send_event(registry, "a", "DELETED", FIRST)
    assert set(services.bodies) == {B}


async def test_recreated_service_wakes_its_key() -> None:
    woken: list[Key] = []
    registry: Any = handlers.registry(woken.append, ServiceCache())
    for type in ("ADDED", "DELETED", "ADDED"):
        await _send_event(registry, "a", type, FIRST)
    assert woken == [A, A, A]
