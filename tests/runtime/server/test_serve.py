"""A pod's server: answers while it starts and serves, authentication, and the end of its ranks."""

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from bench.frame.programs import free_port
from phalanx_api import labels, wire
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import create_health_app
from phalanx_frontend.health import RankHealth
from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.server.devices.monitor import DeviceReport
from phalanx_runtime.server.devices.readings import XidEvent
from phalanx_runtime.server.http.app import PodHealthSource
from phalanx_runtime.server.launch import make_rank_specs
from phalanx_runtime.server.serve import make_server
from phalanx_runtime.server.supervision.pod import Launch, LauncherView, stuck_reason
from phalanx_runtime.server.supervision.supervisor import SupervisorStatus
from phalanx_runtime.settings import ServeSettings
from tests.frontend.auth.issuer import AUDIENCE, running_issuer
from tests.polling import until
from tests.runtime.fake_rank import PAGE_SIZE, command
from tests.runtime.pods import is_alive, make_model, mark_of
from tests.runtime.server.devices.fake_source import FakeSource
from tests.runtime.server.serving_pods import Running, client_of, complete, make_settings, served


async def test_pod_of_a_cluster_answers_over_ipv4_and_ipv6(tmp_path: Path) -> None:
    settings = make_settings(make_model(tmp_path / "tiny"), "--host", labels.ALL_ADDRESSES, "--port", str(free_port()))
    async with served(settings, "ready") as running:
        for host in ("127.0.0.1", "[::1]"):
            assert (await running.http.get(f"http://{host}:{running.port}/healthz")).status_code == 200, host


async def test_pod_answers_over_http_and_reports_its_state(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder), "ready") as running:
        assert (await running.get("/healthz")).status_code == 200
        ready = await running.ready()
        assert (ready["alive"], ready["ready"], ready["reason"], ready["incarnation"]) == (True, True, None, 1)
        assert [(rank["rank"], rank["alive"]) for rank in ready["ranks"]] == [(0, True)]
        models = (await running.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        answer = await running.http.post(f"http://127.0.0.1:{running.port}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        await until(lambda: (load := client_of(running).load()).total_pages > 0 and not load.running)
        metrics = (await running.get("/metrics")).text
        for line in [
            'vllm:num_requests_running{model_name="tiny"} 0.0',
            'phalanx_kv_cache_usage_perc{model_name="tiny"} 0.0',
            'vllm:generation_tokens_total{model_name="tiny"} 4.0',
            'vllm:prompt_tokens_total{model_name="tiny"} 5.0',
            'vllm:request_time_per_output_token_seconds_count{model_name="tiny"} 1.0',
            'vllm:inter_token_latency_seconds_count{model_name="tiny"} 3.0',
            'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
            'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
            'phalanx_requests_finished_total{finished_reason="length",model_name="tiny"} 1.0',
        ]:
            assert line in metrics
        totals = (await running.get("/v1/metrics")).json()
        assert (totals["total_requests"], totals["total_tokens_generated"]) == (1, 4)
        assert totals["avg_latency_ms"] > 0
    assert not is_alive(mark_of(folder, 1, 0)["pid"])


async def test_group_of_a_service_answers_only_its_routers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its pods have no API keys: those of the service are at its routers."""
    settings = make_settings(make_model(tmp_path / "tiny"), PHALANX_POD_INDEX="0")
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    async with served(settings, "ready") as running:
        await running.ready()
        url = f"http://127.0.0.1:{running.port}"
        for path in ("/v1/completions", "/v1/generate", "/v1/models", "/tokenize", "/v1/responses", "/openapi.json"):
            for headers in ({}, {"authorization": "Bearer secre"}, {"x-api-key": "secret"}):
                refused = await running.http.post(f"{url}{path}", json=body, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token"), path
        assert [record.__dict__["object"] for record in caplog.records if record.name == "phalanx.audit"] == ["group"] * 18
        answer = await running.http.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer secret"})
        assert answer.json()["usage"]["completion_tokens"] == 4
        for path in ("/healthz", "/readyz", "/metrics", "/v1/health", "/v1/metrics"):
            assert (await running.get(path)).status_code == 200


async def test_metrics_show_the_curve_of_the_prefix_cache(tmp_path: Path) -> None:
    settings = make_settings(make_model(tmp_path / "tiny"))
    num_pages = 39 // PAGE_SIZE
    async with served(settings, "ready") as running:
        await running.ready()
        assert (await running.get("/v1/metrics")).json()["cache"] is None
        url = f"http://127.0.0.1:{running.port}/v1/completions"
        prompt = [i % 50 for i in range(40)]
        for _ in range(2):
            answer = await running.http.post(url, json={"model": "tiny", "prompt": prompt, "max_tokens": 4})
            assert answer.status_code == 200
        await until(lambda: client_of(running).load().cache_curve.lookups == 2 * num_pages)
        cache = (await running.get("/v1/metrics")).json()["cache"]
        tiers = cache.pop("tiers")
        assert (tiers["host"], tiers["disk"], tiers["hit_rate"]["four_times"]) == (None, None, 0.5)
        assert cache == {"lookups": 2 * num_pages, "hit_rate": {"half": 0.5, "now": 0.5, "twice": 0.5, "four_times": 0.5}}
        metrics = (await running.get("/metrics")).text
        assert 'phalanx_cache_curve_hit_rate{model_name="tiny",size="twice"} 0.5' in metrics
        assert f'phalanx_cache_curve_lookups{{model_name="tiny"}} {2.0 * num_pages}' in metrics


async def test_pod_is_ready_once_its_tokenizer_is_loaded(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    async with served(make_settings(folder), "ready") as running:
        await until(lambda: client_of(running).state().serving)
        assert (await running.get("/readyz")).status_code == 500


async def test_unrecoverable_pod_fails_its_liveness_probe(tmp_path: Path) -> None:
    class StuckSupervisor:
        """Waits for a killed rank that is blocked in the kernel."""

        async def run(self) -> None:
            return

        def status(self) -> SupervisorStatus:
            return SupervisorStatus(False, 2, "pod 0: rank 1 is hung: silent for 5.1 s")

        def stuck_reason(self) -> str | None:
            return stuck_reason(LauncherView("ending", 31.0))

        def ranks(self) -> list[RankHealth]:
            return [RankHealth(0, False, 1.0), RankHealth(1, True, 36.0)]

        def memory(self) -> list[MemoryAccount]:
            return []

        def devices_changed(self, report: DeviceReport) -> None:
            raise AssertionError("no monitor runs")

    app = create_health_app(PodHealthSource(StuckSupervisor(), RequestTotals()).health)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pod") as http:
        alive, health = await http.get("/healthz"), await http.get("/v1/health")
    assert (alive.status_code, alive.json()["error"]["code"]) == (503, "not_alive")
    assert (health.status_code, health.json()["alive"], health.json()["ready"]) == (503, False, False)
    assert health.json()["reason"].startswith("the launcher has been ending for 31 s")
    assert health.json()["ranks"][1] == {"rank": 1, "alive": True, "silent_s": 36.0}


async def test_loading_pod_is_alive_but_not_ready(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder), "hang") as running:
        assert (await running.get("/healthz")).status_code == 200
        response = await running.get("/readyz")
        reason = "loading the model, 0 of 1 pods are ready"
        assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
        health = (await running.get("/v1/health")).json()
        assert (health["alive"], health["ready"], health["reason"]) == (True, False, reason)
        body = {"model": "tiny", "prompt": "hello"}
        answer = await running.http.post(f"http://127.0.0.1:{running.port}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        url = f"ws://127.0.0.1:{running.port}{wire.LINK_PATH}"
        async with websockets.connect(url, additional_headers={"Authorization": "Bearer secret"}) as link:
            await link.send(wire.encode(wire.Hello(PROTOCOL_VERSION, "router")))
            frames = [wire.decode_from_leader(bytes(await link.recv(decode=False))) for _ in range(2)]
        assert isinstance(frames[0], wire.Welcome)
        assert frames[0].assets_hash == ""
        assert isinstance(frames[1], wire.State)
        assert not frames[1].serving


async def test_a_router_is_welcomed_with_the_token(tmp_path: Path) -> None:
    async with served(make_settings(make_model(tmp_path / "tiny")), "ready") as running:
        await running.ready()
        url = f"ws://127.0.0.1:{running.port}{wire.LINK_PATH}"
        with pytest.raises(websockets.InvalidStatus) as caught:
            await websockets.connect(url)
        assert caught.value.response.status_code == 401
        async with websockets.connect(url, additional_headers={"Authorization": "Bearer secret"}) as link:
            await link.send(wire.encode(wire.Hello(PROTOCOL_VERSION, "router")))
            message = await link.recv()
            assert isinstance(message, bytes)
            welcome = wire.decode_from_leader(message)
        assert isinstance(welcome, wire.Welcome)
        assert (welcome.group, welcome.revision, welcome.page_size) == ("tiny-g-abcde", "r1", 16)


def with_group(settings: ServeSettings, **changes: Any) -> ServeSettings:
    return replace(settings, group=replace(settings.group, **changes))


async def test_without_a_token_there_is_no_link(tmp_path: Path) -> None:
    settings = with_group(make_settings(make_model(tmp_path / "tiny")), token=None)
    async with served(settings, "ready") as running:
        await running.ready()
        with pytest.raises(websockets.InvalidStatus):
            await websockets.connect(f"ws://127.0.0.1:{running.port}{wire.LINK_PATH}")


async def test_two_pods_serve_with_one_api_server(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    port = str(free_port())
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", port]
    async with served(make_settings(folder, *flags), "ready") as leader:
        response = await leader.get("/readyz")
        assert response.json()["error"]["message"] == "waiting for pod 1 of the group's 2"
        async with served(make_settings(folder, *flags, "--node-rank", "1"), "ready") as worker:
            assert (await worker.ready())["incarnation"] == 1
            assert [rank["rank"] for rank in (await leader.ready())["ranks"]] == [0]
            os.kill(mark_of(folder, 1, 1)["pid"], signal.SIGSTOP)
            await asyncio.gather(*(until(pod.is_unready) for pod in (leader, worker)))  # each for a moment
            for pod in (leader, worker):
                assert (await pod.get("/healthz")).status_code == 200
            assert (await worker.ready())["incarnation"] == 2
            assert (await worker.get("/v1/models")).status_code == 404
            assert (await worker.get("/metrics")).status_code == 200


@pytest.mark.parametrize("rank", [0, 1])
async def test_failing_draft_restarts_the_group_without_it(tmp_path: Path, rank: int) -> None:
    """All ranks of the start that becomes ready get the reason.

    It is the second start, or the third if one pod reports its lost peer long before the other reports the draft failure.
    """
    folder = make_model(tmp_path / "tiny")
    port = str(free_port())
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", port]
    behavior = ("draft-fails", str(rank))
    async with (
        served(make_settings(folder, *flags), *behavior) as leader,
        served(make_settings(folder, *flags, "--node-rank", "1"), *behavior) as worker,
    ):
        incarnation = (await leader.ready())["incarnation"]
        assert (await worker.ready())["incarnation"] == incarnation in (2, 3)
        reasons = [mark_of(folder, incarnation, started)["draft_missing"] for started in range(2)]
        assert reasons == [f"pod {rank}: rank {rank} ended with code 5: no memory for the draft"] * 2


async def test_pod_enforces_its_keys_and_issuer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    keys = tmp_path / "keys"
    keys.write_text("alice sk-alice -1")
    flags = ["--api-key", "sk-1", "sk-2", "--api-keys-file", str(keys), "--oidc-audience", AUDIENCE]
    with running_issuer() as issuer:
        async with served(make_settings(folder, *flags, "--oidc-issuer", issuer.url), "ready") as running:
            await running.ready()
            assert (await complete(running)).status_code == 401
            for key in ("sk-1", "sk-2", "sk-alice", issuer.token()):
                running.http.headers["authorization"] = f"Bearer {key}"
                assert (await complete(running)).status_code == 200
            running.http.headers["authorization"] = f"Bearer {issuer.token(aud='other')}"
            assert (await complete(running)).status_code == 401


async def test_web_pages_of_allowed_origins_are_answered(tmp_path: Path) -> None:
    settings = make_settings(make_model(tmp_path / "tiny"), "--allowed-origins", '["https://chat.example"]', "--api-key", "sk-1")
    async with served(settings, "ready") as running:
        url = f"http://127.0.0.1:{running.port}/v1/models"
        page = {"origin": "https://chat.example", "access-control-request-method": "GET"}
        for method, status in (("OPTIONS", 200), ("GET", 401)):
            answer = await running.http.request(method, url, headers=page)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, page["origin"])
        assert "access-control-allow-origin" not in (await running.get("/v1/models")).headers


async def test_pod_of_a_former_statefulset_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_model(tmp_path / "tiny")
    port = str(free_port())
    flags = ["-tp", "2", "--nnodes", "2", "--master-port", port]
    settings = with_group(make_settings(folder, *flags), key="current")
    worker = make_settings(folder, *flags, "--node-rank", "1")
    with caplog.at_level(logging.WARNING):
        async with served(settings, "ready") as leader:
            async with served(with_group(worker, key="former"), "ready"):
                await until(lambda: any("the service token is wrong" in getattr(record, "why", "") for record in caplog.records))
            async with served(with_group(worker, key="current"), "ready"):
                await leader.ready()


async def test_pod_with_devices_shows_and_watches_them(tmp_path: Path) -> None:
    source, settings = FakeSource(), make_settings(make_model(tmp_path / "tiny"))
    running = Running(make_server(settings, command("ready"), open_source=lambda num_ranks: source), settings)
    try:
        await until(lambda: running.server.started)
        await running.ready()
        async with asyncio.timeout(20):  # the first reading comes beside the start
            while 'phalanx_device_power_watts{device="0",uuid="GPU-0"} 300.0' not in (await running.get("/metrics")).text:
                await asyncio.sleep(0.05)
        source.events.put(XidEvent(0, 48))
        await until(lambda: client_of(running).state().incarnation == 2 and bool(client_of(running).state().devices))
        state = client_of(running).state()
        assert state.death == "pod 0: device 0: Xid 48 (double-bit ECC error; reset the device)"
        assert [(problem.device, problem.xid) for problem in state.devices] == [(0, 48)]
    finally:
        running.server.should_exit = True
        await running.task
        await running.http.aclose()
    await until(lambda: source.is_closed)  # the thread ends after its turn


async def test_failed_supervisor_ends_the_pod_with_1(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    taken = await asyncio.start_server(lambda reader, writer: None, None, 0)
    port = str(taken.sockets[0].getsockname()[1])
    settings = make_settings(folder, "-tp", "2", "--nnodes", "2", "--master-port", port)
    running = Running(make_server(settings, command("ready")), settings)
    async with asyncio.timeout(20):
        await running.task
    await running.http.aclose()
    taken.close()
    assert running.server.exit_code == 1


def test_ranks_are_numbered_across_pods(tmp_path: Path) -> None:
    flags = ["-tp", "4", "--nnodes", "2", "--node-rank", "1", "--dtype", "bfloat16", "--max-model-len", "99"]
    specs = make_rank_specs(
        make_settings(make_model(tmp_path / "tiny"), *flags),
        Launch(incarnation=3, hosts=("a", "b"), key="key", engine_socket="ipc://x"),
        tmp_path,
        model_version="c0ffee",
    )
    assert [(s.rank, s.local_rank, s.local_world_size, s.world_size, s.engine_socket) for s in specs] == [
        (2, 0, 2, 4, ""),
        (3, 1, 2, 4, ""),
    ]
    assert {s.model_version for s in specs} == {"c0ffee"}
    assert specs[0].hosts == ["a", "a", "b", "b"]
    assert (specs[0].base_port, specs[0].token, specs[0].incarnation, specs[0].engine.dtype) == (8100, "key", 3, "bfloat16")
    stages = ["-tp", "2", "-pp", "2", "--nnodes", "2", "--node-rank", "1"]
    second = make_rank_specs(
        make_settings(tmp_path / "tiny", *stages),
        Launch(incarnation=1, hosts=("a", "b"), key="key", engine_socket="ipc://x"),
        tmp_path,
    )
    assert [(s.rank, s.world_size, s.pipeline_parallel_size) for s in second] == [(2, 4, 2), (3, 4, 2)]
    leader = make_rank_specs(
        make_settings(tmp_path / "tiny", "-tp", "2"),
        Launch(incarnation=1, hosts=("a",), key="key", engine_socket="ipc://x"),
        tmp_path,
    )
    assert [s.engine_socket for s in leader] == ["ipc://x", ""]


PROGRAM = (
    "import gc, sys; from phalanx_runtime.server import serve as s; from phalanx_runtime.__main__ import main;"
    "make = s.make_server; s.make_server = lambda settings: make(settings, sys.argv[1].split());"
    "code = main(sys.argv[2:]); assert not {'torch', 'transformers'} & set(sys.modules);"
    "sys.exit(code or gc.get_freeze_count() < 4 * len(gc.get_objects()))"
)
"""The command line with fake ranks. Exits with 1 if garbage collections read the objects of imports."""


async def test_the_command_serves_until_sigterm_and_leaves_no_rank(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, " ".join(command("ready")), "serve", str(folder), "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while b"group serves" not in (line := await process.stderr.readline()):
            assert line, "the program ended"
        process.send_signal(signal.SIGTERM)
        await process.stderr.read()
        assert await process.wait() == 0
    assert not is_alive(mark_of(folder, 1, 0)["pid"])


async def test_ranks_leave_when_the_server_is_killed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, " ".join(command("ready")), "serve", str(folder), "--port", "0"),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    await until(lambda: (folder / "marks" / "1-0.json").exists())
    process.kill()
    await process.wait()
    await until(lambda: not is_alive(mark_of(folder, 1, 0)["pid"]))
