"""The program around the decisions: settings, the loop, probes, logs, kopf's handlers, the command line."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest
from aiohttp.test_utils import TestClient, TestServer

from phalanx_operator import __main__ as program
from phalanx_operator import metrics as probes
from phalanx_operator.kube.client import Conflict, Denied, Gone, KubeError, Rejected, Retry
from phalanx_operator.kube.store import Key
from phalanx_operator.logs import FieldFormatter
from phalanx_operator.loop import handlers
from phalanx_operator.loop.worker import COALESCE_S, SPACE_S, Loop
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.settings import BadSetting, Settings, read_settings

IMAGES = {"PHALANX_RUNTIME_IMAGE": "r:1", "PHALANX_ROUTER_IMAGE": "o:1"}


def test_settings_come_from_the_environment_or_flags() -> None:
    assert read_settings([], IMAGES) == Settings(runtime_image="r:1", router_image="o:1")
    told = IMAGES | {"PHALANX_NAMESPACES": "a,b", "PHALANX_OPERATOR_PORT": "1", "POD_NAME": "p"}
    assert read_settings([], told) == Settings(
        runtime_image="r:1", router_image="o:1", namespaces=("a", "b"), port=1, pod_name="p"
    )
    assert read_settings(["--prometheus-namespace", "m"], IMAGES) == Settings(
        runtime_image="r:1", router_image="o:1", prometheus_namespace="m"
    )
    assert read_settings([], IMAGES | {"PHALANX_LEASE_SECONDS": "20"}) == Settings(
        runtime_image="r:1", router_image="o:1", lease_seconds=20
    )
    flags = ["--namespace", "c", "d", "--namespace", "e", "--runtime-image", "x", "--port", "0", "--workers", "2"]
    assert read_settings(flags, told) == Settings(
        runtime_image="x", router_image="o:1", namespaces=("c", "d", "e"), port=0, workers=2, pod_name="p"
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {}, "PHALANX_RUNTIME_IMAGE is not set"),
        (["--port", "x"], IMAGES, "PHALANX_OPERATOR_PORT: 'x'"),
        (["--workers", "0"], IMAGES, "PHALANX_OPERATOR_WORKERS: '0'"),
        (["--lease-seconds", "2"], IMAGES, "PHALANX_LEASE_SECONDS: '2'"),
        (["--prometheus-namespace", "A_b"], IMAGES, "PHALANX_PROMETHEUS_NAMESPACE: 'A_b'"),
        (["--namespace", "A_b"], IMAGES, "PHALANX_NAMESPACES: 'A_b'"),
    ],
)
def test_a_bad_setting_is_named(arguments: list[str], environment: dict[str, str], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        read_settings(arguments, environment)


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "usage"), (["run", "--port", "x"], "PHALANX_"), (["run", "--nonsense"], "usage")]
)
def test_a_bad_command_line_ends_with_status_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx-operator", *arguments])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_the_crd_can_be_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["phalanx-operator", "crd"])
    program.main()
    assert "kind: CustomResourceDefinition" in capsys.readouterr().out


def test_signal_during_import_ends_the_operator_cleanly() -> None:
    """What it imports takes a while."""
    code = (
        "import signal, sys\n"
        "class Now:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'phalanx_operator.settings': signal.raise_signal(signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Now())\n"
        "sys.argv = ['phalanx-operator', 'run', '--port', 'x']\n"
        "from phalanx_operator.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b""), "it came to no bad flag, and did not die of the signal"


A, B = ("team", "a"), ("team", "b")


def make_loop(reconcile: Callable[[Key], Awaitable[float | None]]) -> tuple[Loop, list[tuple[Key, float]]]:
    """A loop whose wishes are noted."""
    wishes: list[tuple[Key, float]] = []

    class Noting(Loop):
        def wake(self, key: Key, after_s: float = 0.0) -> None:
            wishes.append((key, after_s))
            super().wake(key, after_s)

    return Noting(reconcile, Metrics(), clock=lambda: 0.0, draw=lambda: 0.5), wishes


async def test_rapid_changes_are_batched_except_urgent_ones() -> None:
    now = 100.0

    async def reconcile(_: Key) -> float | None:
        return 600.0

    loop = Loop(reconcile, Metrics(), clock=lambda: now, draw=lambda: 0.5)
    await loop.look(A)
    due = loop._wakeups.next_due
    assert due() == 700.0
    now = 100.1
    loop.wake(A)
    assert due() == 100.0 + SPACE_S
    loop.wake(B)
    assert due() == now + COALESCE_S, "nobody else waits for it"
    loop.wake(A, after_s=0.0)
    assert due() == now
    now = 101.0
    assert {loop._wakeups.take(now), loop._wakeups.take(now)} == {A, B}
    loop._wakeups.done(A)
    loop.wake(A)
    assert due() == now + COALESCE_S, "it was long ago"


@pytest.mark.parametrize("error", [Conflict, Gone, Rejected, Denied, Retry, TimeoutError, ZeroDivisionError])
async def test_a_failed_look_is_tried_again_later_and_later(error: type[Exception]) -> None:
    async def fail(_: Key) -> float | None:
        raise error("no")

    loop, wishes = make_loop(fail)
    for _ in range(3):
        await loop.look(A)
    assert wishes == [(A, 0.375), (A, 0.75), (A, 1.5)]


async def test_successful_reconcile_resets_failures_and_schedules_the_next() -> None:
    answers: list[Any] = [Retry("no"), 600.0, Retry("no"), None]

    async def reconcile(_: Key) -> float | None:
        answer = answers.pop(0)
        if isinstance(answer, KubeError):
            raise answer
        return float(answer) if answer else None

    loop, wishes = make_loop(reconcile)
    for _ in range(4):
        await loop.look(A)
    assert wishes == [(A, 0.375), (A, 600.0), (A, 0.375)]


async def test_workers_reconcile_woken_keys_never_twice_at_once() -> None:
    running: set[Key] = set()
    looks: list[Key] = []
    enough = asyncio.Event()

    async def reconcile(key: Key) -> float | None:
        assert key not in running
        running.add(key)
        looks.append(key)
        if looks.count(A) == 1:
            loop.wake(A, 0.0)
        for _ in range(5):
            await asyncio.sleep(0)
        running.discard(key)
        if looks.count(A) >= 2 and B in looks:
            enough.set()
        return None

    loop = Loop(reconcile, Metrics(), draw=lambda: 0.5)
    loop.wake(("team", ""), 0.0)
    task = asyncio.create_task(loop.work(3))
    await asyncio.sleep(0)
    loop.wake(A, 0.0)
    loop.wake(B, 0.001)
    async with asyncio.timeout(5):
        await enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ("team", "") not in looks


async def test_probes_report_health_readiness_and_metrics() -> None:
    health, metrics = probes.Health(), Metrics()
    async with TestClient(TestServer(probes.make_app(health, metrics))) as client:

        async def ask(path: str) -> tuple[int, str]:
            async with client.get(path) as response:
                return response.status, await response.text()

        assert [await ask("/healthz"), await ask("/readyz")] == [(200, "ok"), (503, "starting")]
        health.ready = True
        health.stalls = lambda: ["nothing heard of pods"]
        assert [await ask("/healthz"), await ask("/readyz")] == [(503, "nothing heard of pods"), (200, "ok")]
        metrics.is_leader.set(1)
        assert "phalanx_operator_is_leader 1.0" in (await ask("/metrics"))[1]


async def test_the_endpoint_takes_a_free_port() -> None:
    runner = await probes.serve(probes.make_app(probes.Health(), Metrics()), 0)
    assert runner.addresses[0][1] > 0
    await runner.cleanup()


def test_log_lines_carry_their_values_as_fields() -> None:
    record = logging.makeLogRecord({"msg": "group created", "group": "g", "why": "two words", "empty": "", "levelname": "INFO"})
    assert FieldFormatter("%(levelname)s %(message)s").format(record) == "INFO group created group=g why='two words'"


def test_kopf_only_watches_and_so_writes_nothing() -> None:
    """Handlers for changes would write annotations, handlers for deletions a finalizer."""
    handlers.quiet()
    found: Any = handlers.registry(lambda key: None, ServiceCache())
    assert found._changing.get_all_handlers() == []
    assert [handler.fn.__name__ for handler in found._watching.get_all_handlers()] == ["changed"]


async def _tell(registry: Any, name: str, type: str | None, meta: dict[str, Any]) -> None:
    event = {"type": type, "object": {"metadata": meta | {"namespace": "team", "name": name}}}
    await registry._watching.get_all_handlers()[0].fn(namespace="team", name=name, type=type, event=event, meta=meta)


async def test_an_event_of_a_service_wakes_its_key() -> None:
    woken: list[Key] = []
    found: Any = handlers.registry(woken.append, ServiceCache())
    meta = {"uid": "1", "generation": 1, "resourceVersion": "1"}
    await _tell(found, "a", "ADDED", meta)
    settings = kopf.OperatorSettings()
    startup, login = found._activities.get_all_handlers()
    startup.fn(settings=settings)
    assert woken == [A]
    assert settings.posting.enabled is False
    assert settings.persistence.diffbase_storage.build(body=kopf.Body({})) == {}, "kopf copies no object to compare it"
    assert login.fn.__name__ == "login"


FIRST = {"uid": "1", "generation": 1, "resourceVersion": "1"}


@pytest.mark.parametrize(
    ("type", "meta", "is_woken"),
    [
        pytest.param("MODIFIED", FIRST | {"resourceVersion": "2"}, False, id="its status"),
        pytest.param(None, FIRST | {"resourceVersion": "2"}, False, id="listed again"),
        pytest.param("MODIFIED", FIRST | {"generation": 2}, True, id="its spec"),
        pytest.param("MODIFIED", FIRST | {"deletionTimestamp": "now"}, True, id="it is to go"),
        pytest.param("MODIFIED", FIRST | {"uid": "2"}, True, id="another one of its name"),
        pytest.param("DELETED", FIRST, True, id="it is gone"),
    ],
)
async def test_own_writes_wake_no_service(type: str | None, meta: dict[str, Any], is_woken: bool) -> None:
    woken: list[Key] = []
    found: Any = handlers.registry(woken.append, ServiceCache())
    await _tell(found, "a", None, FIRST)
    await _tell(found, "b", None, FIRST)
    await _tell(found, "a", type, meta)
    assert woken == [A, ("team", "b"), *([A] if is_woken else [])]


async def test_watched_state_is_cached_until_the_service_is_deleted() -> None:
    services = ServiceCache()
    found: Any = handlers.registry(lambda key: None, services)
    await _tell(found, "a", None, FIRST)
    await _tell(found, "b", "ADDED", FIRST)
    await _tell(found, "b", "MODIFIED", FIRST | {"resourceVersion": "2"})
    assert {key[1]: known.version for key, known in services.bodies.items()} == {"a": 1, "b": 2}
    await _tell(found, "a", "DELETED", FIRST)
    assert set(services.bodies) == {B}


async def test_recreated_service_wakes_its_key() -> None:
    woken: list[Key] = []
    found: Any = handlers.registry(woken.append, ServiceCache())
    for type in ("ADDED", "DELETED", "ADDED"):
        await _tell(found, "a", type, FIRST)
    assert woken == [A, A, A]
