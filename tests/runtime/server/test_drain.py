"""Pods after SIGTERM: running requests continue for the timeout, new ones are refused, and the group drains."""

import asyncio
import signal
from pathlib import Path

import pytest
import websockets

from phalanx_api import wire
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_runtime.server.serve import make_server
from tests.polling import until
from tests.runtime.fake_rank import command
from tests.runtime.pods import is_alive, make_model, mark_of
from tests.runtime.server.serving_pods import client_of, complete, make_settings, served, two_pods


@pytest.mark.parametrize(("timeout", "signals"), [("0", 1), ("0.1", 1), ("600", 2)], ids=["at once", "after a time", "twice"])
async def test_signal_ends_streams_with_an_error_then_the_server(tmp_path: Path, timeout: str, signals: int) -> None:
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder, "--shutdown-timeout", timeout), "mute") as running:
        await running.ready()
        request = asyncio.create_task(complete(running))
        client = client_of(running)
        await until(lambda: client.is_busy)
        for _ in range(signals):
            running.server.handle_exit(signal.SIGTERM, None)
        answer = await request
        assert answer.status_code == 503
        assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("shutting_down", "the pod is stopping")
        await running.task
        assert running.server.exit_code == 0
    assert not is_alive(mark_of(folder, 1, 0)["pid"])


async def test_signal_during_start_ends_the_server(tmp_path: Path) -> None:
    """For example, a group is deleted while its first pod starts."""
    server = make_server(make_settings(make_model(tmp_path / "tiny")), command("mute"))
    previous = signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await server.serve()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert server.exit_code == 0


async def test_terminating_server_finishes_requests_and_accepts_no_new(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder, "--shutdown-timeout", "600"), "mute") as running:
        await running.ready()
        request = asyncio.create_task(complete(running))
        client = client_of(running)
        await until(lambda: client.is_busy)
        running.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: not client.state().serving)
        refused = await complete(running)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert (await running.get("/readyz")).status_code == 503
        health = await running.get("/v1/health")
        assert (health.status_code, health.json()["alive"], health.json()["ready"]) == (503, True, False)
        assert client.is_busy and not request.done() and not running.task.done()
        request.cancel()  # no request is open: the server ends
        async with asyncio.timeout(30):
            await running.task
        assert running.server.exit_code == 0
    assert not is_alive(mark_of(folder, 1, 0)["pid"])


async def test_terminating_leader_reports_draining_and_finishes_streams(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with served(make_settings(folder, "--shutdown-timeout", "600"), "mute") as running:
        await running.ready()
        client = client_of(running)
        url = f"ws://127.0.0.1:{running.port}{wire.LINK_PATH}"
        async with websockets.connect(url, additional_headers={"Authorization": "Bearer secret"}) as link:
            await link.send(wire.encode(wire.Hello(PROTOCOL_VERSION, "router")))
            request = wire.Request(id="r", epoch=0, prompt=[1, 2], delivered=[], sampling=wire.Sampling(max_tokens=4, seed=0))
            await link.send(wire.encode(wire.Submit(1, request)))
            await until(lambda: client.is_busy)
            running.server.handle_exit(signal.SIGTERM, None)
            states: list[wire.State] = []
            while len(states) < 2:
                frame = wire.decode_from_leader(bytes(await link.recv(decode=False)))
                states += [frame] if isinstance(frame, wire.State) else []
            assert [(state.serving, state.draining) for state in states] == [(True, False), (False, True)]
            assert (await running.get("/readyz")).status_code == 503
            assert client.is_busy
            await link.send(wire.encode(wire.Abort([1])))
            async with asyncio.timeout(30):
                await running.task


async def test_group_termination_finishes_open_streams(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with two_pods(folder) as (leader, worker):
        request = asyncio.create_task(complete(leader))
        await until(lambda: client_of(leader).is_busy)
        worker.server.handle_exit(signal.SIGTERM, None)  # deleting a StatefulSet signals all pods
        leader.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: client_of(leader).state().draining)
        await until(worker.is_unready)
        health = await worker.get("/readyz")
        assert health.json()["error"]["message"] == "the pod is stopping"
        await asyncio.wait([request, worker.task], timeout=0.5)  # a worker that did not wait would have ended by then
        assert not request.done() and not worker.task.done() and not worker.server.should_exit
        (folder / "marks" / "go").touch()
        answer = await request
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 16)
        async with asyncio.timeout(30):
            await asyncio.gather(leader.task, worker.task)
        assert (leader.server.exit_code, worker.server.exit_code) == (0, 0)
    assert not any(is_alive(mark_of(folder, 1, rank)["pid"]) for rank in (0, 1))


@pytest.mark.parametrize(("worker_s", "signals"), [("0.1", 1), ("600", 2)], ids=["timeout", "second signal"])
async def test_worker_ends_while_its_group_serves_after(tmp_path: Path, worker_s: str, signals: int) -> None:
    folder = make_model(tmp_path / "tiny")
    async with two_pods(folder, worker_s=worker_s) as (leader, worker):
        request = asyncio.create_task(complete(leader))
        await until(lambda: client_of(leader).is_busy)
        for _ in range(signals):
            worker.server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(30):
            await worker.task
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "group_restarting")


async def test_terminating_worker_waits_for_streams_and_a_successor(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    async with two_pods(folder) as (leader, worker):
        request = asyncio.create_task(complete(leader))
        await until(lambda: client_of(leader).is_busy)
        worker.server.handle_exit(signal.SIGTERM, None)  # as an eviction does
        await until(lambda: client_of(leader).state().draining)
        assert (await complete(leader)).status_code == 503
        assert not request.done() and not worker.server.should_exit
        (folder / "marks" / "go").touch()
        assert (await request).json()["usage"]["completion_tokens"] == 16
        async with asyncio.timeout(30):
            await worker.task
        assert (worker.server.exit_code, leader.server.should_exit) == (0, False)
        reason = (await leader.get("/readyz")).json()["error"]["message"]
        assert reason.startswith("waiting for pod 1")
        async with served(worker.settings, "held") as successor:
            await leader.ready()
            await successor.ready()
            assert (await leader.get("/v1/health")).json()["incarnation"] == 2
            assert (await complete(leader)).status_code == 200


async def test_worker_without_a_serving_group_ends_at_once(tmp_path: Path) -> None:
    flags = ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--shutdown-timeout", "600", "--master-port", "1"]
    async with served(make_settings(make_model(tmp_path / "tiny"), *flags), "ready") as worker:
        worker.server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(30):
            await worker.task
