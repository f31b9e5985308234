"""Supervisors of one to three pods over fake ranks: start, failures, recovery."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.devices.monitor import DeviceReport
from phalanx_runtime.server.supervision.hang_detection import SilenceBounds
from phalanx_runtime.server.supervision.pod import Launch
from phalanx_runtime.server.supervision.rendezvous_wire import GroupTokens, Timing
from phalanx_runtime.server.supervision.supervisor import (
    LeaderSupervisor,
    PodPlace,
    SupervisorParts,
    SupervisorStatus,
    WorkerSupervisor,
)
from tests.polling import until
from tests.runtime.engine.engine_scene import FakeMeter
from tests.runtime.fake_rank import command
from tests.runtime.fake_runner import expected_output, make_request
from tests.runtime.pods import is_alive, make_spec, mark_of

TOKENS = partial(list[str], ["t"])
QUICK = Timing(ping_s=0.05, silence_s=5.0, first_retry_s=0.001, max_retry_s=0.01)


PATIENT = SilenceBounds(silence_s=2.0)
"""Twenty heartbeats of a fake rank: a busy machine may delay some."""


def make_parts(folder: Path, pod: int, pods: int, *behavior: str) -> SupervisorParts:
    """One rank in each pod."""

    async def locate() -> Path:
        return folder

    def specs(launch: Launch, model: Path) -> list[RankSpec]:
        spec = make_spec(model, pod, pods, launch.incarnation)
        changes = {"engine_socket": launch.engine_socket, "token": launch.key, "hosts": list(launch.hosts)}
        return [RankSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | changes)]

    def assets(model: Path, ready: RankReady) -> wire.Assets:
        return wire.make_assets({}, ["tiny"], ready.max_model_len, [])

    return SupervisorParts(locate=locate, make_specs=specs, read_assets=assets, command=command(*behavior), bounds=PATIENT)


class Group:
    """A group of pods with fake ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = EngineClient(FakeMeter(), EngineSocket())
        self.backend = LocalBackend(self.client)
        self.leader: LeaderSupervisor | None = None
        self.workers: dict[int, WorkerSupervisor] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def status(self) -> list[SupervisorStatus]:
        assert self.leader is not None
        return [self.leader.status(), *(worker.status() for worker in self.workers.values())]

    async def serving(self, incarnation: int) -> None:
        await until(lambda: all(status == SupervisorStatus(True, incarnation, "") for status in self.status()))

    async def lead(self, pods: int, *behavior: str, tokens: GroupTokens = TOKENS) -> None:
        place = PodPlace(
            pod=0, num_pods=pods, leader_host="127.0.0.1", port=0, tokens=tokens, timing=QUICK, listen_host="127.0.0.1"
        )
        self.leader = LeaderSupervisor(place, make_parts(self.folder, 0, pods, *behavior), self.client)
        self.tasks[0] = asyncio.create_task(self.leader.run())
        if pods > 1:
            await until(lambda: self.leader is not None and self.leader.port is not None)

    def join(self, pod: int, pods: int, *behavior: str, tokens: GroupTokens = TOKENS) -> None:
        assert self.leader is not None and self.leader.port is not None
        place = PodPlace(pod=pod, num_pods=pods, leader_host="127.0.0.1", port=self.leader.port, tokens=tokens, timing=QUICK)
        self.workers[pod] = WorkerSupervisor(place, make_parts(self.folder, pod, pods, *behavior))
        self.tasks[pod] = asyncio.create_task(self.workers[pod].run())

    async def end(self, pod: int) -> None:
        self.tasks[pod].cancel()
        await asyncio.wait([self.tasks.pop(pod)])

    async def answer(self, request: wire.Request) -> list[int]:
        async with asyncio.timeout(20):
            return [t async for delta in self.backend.generate(request) if isinstance(delta, Delta) for t in delta.tokens]


@asynccontextmanager
async def group_in(folder: Path) -> AsyncIterator[Group]:
    group = Group(folder)
    async with AsyncExitStack() as stack:
        stack.callback(group.client.close)
        try:
            yield group
        finally:
            for pod in list(group.tasks):
                await group.end(pod)
    pids = [mark_of(folder, *map(int, mark.stem.split("-")))["pid"] for mark in (folder / "marks").glob("*.json")]
    assert not [pid for pid in pids if is_alive(pid)], "a rank survived its pod"


async def test_killed_rank_starts_a_new_incarnation(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(1, "ready")
        await group.serving(1)
        request = make_request(5, 6)
        assert await group.answer(request) == expected_output(request)
        assert group.client.assets().max_model_len == 200
        os.kill(mark_of(tmp_path, 1, 0)["pid"], signal.SIGKILL)
        await group.serving(2)
        state = group.client.state()
        served = wire.Served("a model", "a layout", 64)
        assert state == wire.State(serving=True, incarnation=2, served=served, deaths=1, death=state.death), (
            "identity reported by rank 0"
        )
        assert "rank 0 was killed by signal 9" in state.death
        assert await group.answer(request) == expected_output(request)


async def test_open_streams_receive_the_loss(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(1, "mute")
        await group.serving(1)
        stream = group.backend.generate(make_request(5, 6))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: group.client.is_busy)
        os.kill(mark_of(tmp_path, 1, 0)["pid"], signal.SIGKILL)
        with pytest.raises(BackendError, match="was killed by signal 9") as caught:
            async with asyncio.timeout(20):
                await first
        assert caught.value.code == "group_restarting"


@pytest.mark.parametrize(
    ("behavior", "why"),
    [("silent-at", "pod 1: rank 1 is hung: silent for"), ("slow-at", "pod 1: rank 1 is hung: step 7 has taken 11.0 s")],
)
async def test_hung_rank_ends_all_and_the_group_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, behavior: str, why: str
) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, behavior, "1")
        await group.serving(1)
        (tmp_path / "marks" / "go").touch()
        await group.serving(2)
        assert not [rank for rank in (0, 1) if is_alive(mark_of(tmp_path, 1, rank)["pid"])]
        stopped = [vars(record)["why"] for record in caplog.records if record.message == "group stopped"]
        assert any(reason.startswith(why) for reason in stopped), stopped
        request = make_request(5, 6)
        assert await group.answer(request) == expected_output(request)


async def test_stopped_rank_ends_streams_and_readiness(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(1, "mute")
        await group.serving(1)
        stream = group.backend.generate(make_request(5, 6))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: group.client.is_busy)
        os.kill(mark_of(tmp_path, 1, 0)["pid"], signal.SIGSTOP)
        with pytest.raises(BackendError, match="rank 0 is hung: silent for") as caught:
            async with asyncio.timeout(20):
                await first
        assert caught.value.code == "group_restarting"
        assert not group.status()[0].ready
        await group.serving(2)


async def test_three_pods_start_and_restart_together(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(3, "ready")
        group.join(1, 3, "ready")
        await until(lambda: group.status()[0].reason == "waiting for pod 2 of the group's 3")
        assert not (tmp_path / "marks").exists()
        group.join(2, 3, "ready")
        await group.serving(1)
        assert {mark_of(tmp_path, 1, rank)["token"] for rank in range(3)} == {mark_of(tmp_path, 1, 0)["token"]}
        assert mark_of(tmp_path, 1, 2)["hosts"] == ["127.0.0.1"] * 3
        os.kill(mark_of(tmp_path, 1, 2)["pid"], signal.SIGKILL)
        await group.serving(2)
        assert mark_of(tmp_path, 2, 0)["token"] != mark_of(tmp_path, 1, 0)["token"]
        request = make_request(5, 6)
        assert await group.answer(request) == expected_output(request)


async def test_ranks_share_a_key_while_a_token_rotates(tmp_path: Path) -> None:
    """One pod has read the step before, the other the step after."""
    async with group_in(tmp_path) as group:
        await group.lead(3, "ready")
        group.join(1, 3, "ready", tokens=lambda: ["former", "t"])
        group.join(2, 3, "ready", tokens=lambda: ["t", "former"])
        await until(lambda: "waiting for pod 1" in group.status()[0].reason)  # it sends a token that the leader does not know
        await group.end(1)
        group.join(1, 3, "ready", tokens=lambda: ["t", "new"])
        await group.serving(1)
        assert len({mark_of(tmp_path, 1, rank)["token"] for rank in range(3)}) == 1


async def test_a_pod_without_the_leaders_token_reports_it(tmp_path: Path) -> None:
    """It joins with a token that both accept, and does not know the one of the ranks' key."""
    read = ["former", "new"]
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready", tokens=lambda: ["new", "former"])
        group.join(1, 2, "ready", tokens=lambda: read[:1])
        await until(lambda: "pod 1: this pod has not read the leader's token yet" in group.status()[0].reason)
        read[:] = ["new"]
        await until(lambda: all(status.ready for status in group.status()))


async def test_leaving_pod_stops_the_group_until_it_returns(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        await group.end(1)
        await until(lambda: not group.status()[0].ready)
        assert "pod 1 left: the connection was closed" in group.status()[0].reason
        await until(lambda: not is_alive(mark_of(tmp_path, 1, 0)["pid"]))
        group.join(1, 2, "ready")
        await group.serving(2)


async def test_leaving_leader_stops_pods_until_the_next_leader(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        await group.end(0)
        await until(lambda: not group.workers[1].status().ready)
        await until(lambda: not is_alive(mark_of(tmp_path, 1, 1)["pid"]))
        assert "leader 127.0.0.1" in group.workers[1].status().reason


HOT = wire.DeviceProblem(kind="throttled", pod=1, device=0, message="throttled (hw_thermal)")
XID = wire.DeviceProblem(kind="fault", pod=1, device=0, xid=79, message="Xid 79")


@pytest.mark.parametrize("pod", [0, 1])
async def test_failed_device_ends_the_incarnation_with_its_reason(tmp_path: Path, pod: int) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        assert group.leader is not None
        supervisor = group.workers[1] if pod else group.leader
        supervisor.devices_changed(DeviceReport((), "device 0: Xid 79"))
        await group.serving(2)
        assert not [rank for rank in (0, 1) if is_alive(mark_of(tmp_path, 1, rank)["pid"])]
        assert (group.client.state().deaths, group.client.state().death) == (1, f"pod {pod}: device 0: Xid 79")


async def test_cuda_error_is_reported_with_the_drivers_xid(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(1, "exit", "6", "rank lost its device: CUDA error")
        assert group.leader is not None
        await until(lambda: (tmp_path / "marks" / "1-0.json").exists())
        group.leader.devices_changed(DeviceReport((XID,), "device 0: Xid 79"))
        await until(lambda: group.client.state().deaths == 1)
        assert group.client.state().death.startswith("pod 0: device 0: Xid 79")


async def test_cuda_error_alone_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(1, "exit", "6", "rank lost its device: CUDA error")
        await until(lambda: group.client.state().deaths == 1)
        assert group.client.state().death == "pod 0: rank 0 ended with code 6: rank lost its device: CUDA error"


async def test_device_failure_without_ranks_ends_nothing(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        assert group.leader is not None
        group.leader.devices_changed(DeviceReport((XID,), "device 0: Xid 79"))
        group.join(1, 2, "ready")
        await group.serving(1)


async def test_problems_of_every_pod_reach_the_routers(tmp_path: Path) -> None:
    own = wire.DeviceProblem(kind="fault", pod=0, device=1, message="lost")
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        changes: list[wire.State] = []
        group.client.subscribe(lambda: changes.append(group.client.state()))
        group.workers[1].devices_changed(DeviceReport((HOT,)))
        await until(lambda: group.client.state().devices == [HOT])
        assert group.leader is not None
        group.leader.devices_changed(DeviceReport((own,)))
        group.workers[1].devices_changed(DeviceReport((HOT, XID)))
        await until(lambda: group.client.state().devices == [own, HOT, XID])
        assert [state.devices for state in changes] == [[HOT], [own, HOT], [own, HOT, XID]] and group.client.state().serving
        await group.end(1)
        await until(lambda: group.client.state().devices == [own])
        group.join(1, 2, "ready")
        group.workers[1].devices_changed(DeviceReport((HOT,)))
        await until(lambda: group.client.state().devices == [own, HOT])


async def test_power_is_reported_once_all_pods_have(tmp_path: Path) -> None:
    power = wire.DevicePower(400.0, 100.0)
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        assert group.leader is not None
        group.leader.devices_changed(DeviceReport(power=power))
        assert group.client.state().power == wire.NO_POWER
        group.workers[1].devices_changed(DeviceReport(power=power))
        await until(lambda: group.client.state().power == wire.DevicePower(800.0, 200.0))
        await group.end(1)
        await until(lambda: group.client.state().power == wire.NO_POWER)


def has_power(group: Group, watts: float) -> bool:
    return group.client.state().power.mean_w == watts


async def test_energy_of_all_pods_is_divided_among_tenants(tmp_path: Path) -> None:
    one, two = wire.DevicePower(100.0, 100.0), wire.DevicePower(200.0, 200.0)
    uses = [wire.TenantUse("a", 1.0, 1, 1), wire.TenantUse("b", 3.0, 1, 1)]
    load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=1, total_pages=1, tenants=uses)
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "ready")
        await group.serving(1)
        assert group.leader is not None
        for power, worker_j, leader_j in ((one, 40.0, 6.0), (two, 140.0, 66.0)):
            group.workers[1].devices_changed(DeviceReport(power=power, energy_j=worker_j))
            if power is one:
                group.leader.devices_changed(DeviceReport(power=one, energy_j=5.0))
            watts = power.mean_w + one.mean_w
            await until(partial(has_power, group, watts))  # the worker's report has arrived
            group.leader.devices_changed(DeviceReport(power=one, energy_j=leader_j))
            group.client.handle_message(wire.encode(load))
        assert [use.energy_j for use in group.client.load().tenants] == [40.0, 120.0], "160 J since the step before"
        await group.end(1)
        group.leader.devices_changed(DeviceReport(power=one, energy_j=70.0))
        group.client.handle_message(wire.encode(load))
        assert [use.energy_j for use in group.client.load().tenants] == [None, None], "a pod does not count"


async def test_unloadable_model_is_reported_and_backs_off(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        group.join(1, 2, "exit", "4", "no such tensor")
        await until(lambda: "waiting 1 s before start 2" in group.status()[0].reason)
        assert group.status()[0].reason.endswith("pod 1: rank 1 ended with code 4: no such tensor")
        await until(lambda: "no such tensor" in group.status()[1].reason)
        with pytest.raises(BackendError, match="no such tensor"):
            await group.answer(make_request())


async def test_a_taken_port_ends_the_leader(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, None, 0)
    port = taken.sockets[0].getsockname()[1]
    client = EngineClient(FakeMeter(), EngineSocket())
    leader = LeaderSupervisor(
        PodPlace(pod=0, num_pods=2, leader_host="127.0.0.1", port=port, tokens=TOKENS),
        make_parts(tmp_path, 0, 2, "ready"),
        client,
    )
    with pytest.raises(OSError, match="in use"):
        await leader.run()
    taken.close()
    client.close()


async def test_worker_without_a_model_raises_its_reason(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        await group.lead(2, "ready")
        assert group.leader is not None and group.leader.port is not None
        place = PodPlace(pod=1, num_pods=2, leader_host="127.0.0.1", port=group.leader.port, tokens=TOKENS, timing=QUICK)
        parts = replace(make_parts(tmp_path, 1, 2, "exit", "4", "no such tensor"), is_in_pod=False)
        with pytest.raises(ModelError, match="no such tensor"):
            await asyncio.wait_for(WorkerSupervisor(place, parts).run(), 60)
