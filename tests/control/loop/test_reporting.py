"""Executed actions are announced and counted once, also if a later call fails; a status write counts once it succeeded."""

import logging
from typing import Any

import pytest

from phalanx_operator.kube.client import (
    EVENTS,
    PODS,
    Conflict,
    Denied,
    Json,
    KubeError,
    Rejected,
    Resource,
    Retry,
)
from phalanx_operator.loop.reporting import MAX_NOTE_BYTES, EventNote, EventRecorder
from tests.control.builders import make_snapshot
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import LONG_AGO, make_unready, settled_world
from tests.control.worlds import KEY, World

STATUS_WRITE = "apply inferenceservices/status chat"
SPEC: dict[str, Any] = {"placement": {"gang": {"mode": "None"}}, "parallelism": {"tensor": 2, "gpusPerPod": 1}}


def announced(world: World, reason: str) -> list[str]:
    """Returns the targets of the actions in events with this reason, sorted."""
    notes = [body["note"] for body in world.kube.of_kind(EVENTS).values() if body["reason"] == reason]
    return sorted(line.partition(": ")[0] for note in notes for line in note.split("; "))


def counted(world: World, metric: str, **labels: str) -> float:
    return world.metrics.registry.get_sample_value(f"phalanx_operator_{metric}_total", labels) or 0.0


async def third_creation() -> str:
    """Returns the call that creates the third group."""
    return [call for call in await World(replicas=3, **SPEC).reconcile() if call.startswith("create statefulsets")][2]


@pytest.mark.parametrize("status_error", [None, Retry, Conflict])
@pytest.mark.parametrize("error", [Rejected, Denied, Retry, None])
async def test_created_groups_are_announced_once_despite_failures(
    error: type[KubeError] | None, status_error: type[KubeError] | None
) -> None:
    world, failures = World(replicas=3, **SPEC), {await third_creation(): error, STATUS_WRITE: status_error}
    world.kube.failures = {call: failure("why") for call, failure in failures.items() if failure}
    if error or status_error:
        with pytest.raises(KubeError):
            await world.reconciler.reconcile(KEY)
        assert len(world.groups) == (2 if error else 3)
        assert announced(world, "GroupCreated") == sorted(world.groups), "at once"
    world.kube.failures.clear()
    await world.settle()
    assert announced(world, "GroupCreated") == sorted(world.groups)
    assert len(world.groups) == counted(world, "actions", action="CreateGroup") == 3


@pytest.mark.parametrize("error", [Denied, Retry])
async def test_restarts_are_announced_once_despite_failures(error: type[KubeError]) -> None:
    world = await settled_world(replicas=2, **SPEC)
    make_unready(world, LONG_AGO)
    first, second = sorted(world.groups)
    world.kube.failures[f"quick-delete pods {second}-0"] = error("why")
    before = len(world.kube.calls)
    with pytest.raises(error):
        await world.reconcile()
    assert first in announced(world, "GroupRestarted"), "at once"
    world.cluster.sync_informers()
    await world.reconcile()
    deletions = [call for call in world.kube.calls[before:] if call.startswith("quick-delete")]
    assert sorted(set(deletions)) == [f"quick-delete pods {group}-{i}" for group in (first, second) for i in range(2)]
    assert [deletions.count(f"quick-delete pods {first}-{i}") for i in range(2)] == [1, 1], "no restart is repeated"
    assert announced(world, "GroupRestarted") == [first, second] and counted(world, "actions", action="RestartGroup") == 2


async def test_status_writes_count_once_they_succeed() -> None:
    world = World(**SPEC)
    world.kube.failures[STATUS_WRITE] = Retry("why")
    with pytest.raises(Retry):
        await world.reconcile()
    assert counted(world, "status_writes") == 0
    await world.settle()
    assert counted(world, "status_writes") == world.kube.calls.count(STATUS_WRITE) - 1 > 0


async def test_events_report_each_transition_once() -> None:
    world = World()
    await world.settle()
    await world.reconcile()
    assert sorted(world.events()) == [("Normal", "GroupCreated"), ("Normal", "GroupsNotReady"), ("Normal", "Ready")]


@pytest.mark.parametrize(
    ("failure", "note"),
    [("", ("Normal", "GroupsNotReady")), ("ImagePullBackOff", ("Warning", "ImagePullFailed"))],
    ids=["transient", "needs action"],
)
async def test_ready_transitions_are_reported_once_across_operators(failure: str, note: tuple[str, str]) -> None:
    world, ready = World(), ("Normal", "Ready")
    await world.settle()
    first = world.events()
    await World(world.kube).settle()
    assert first[-1] == ready and world.events() == first, "a new operator repeats no event"
    world.cluster.start_pods(ready=False, reason=failure)
    for pod in world.kube.of_kind(PODS).values():
        pod["status"]["conditions"][0]["lastTransitionTime"] = world.now
    await world.reconcile()
    await world.reconcile()
    assert world.events() == [*first, note]
    other = World(world.kube)
    await other.reconcile()
    assert other.events() == [*first, note]
    await other.settle()
    await other.reconcile()
    assert other.events() == [*first, note, ready]


async def test_events_name_all_of_many_groups() -> None:
    world = World(replicas=30)
    await world.settle()
    messages = [body["note"] for body in world.kube.of_kind(EVENTS).values() if body["reason"] == "GroupCreated"]
    assert all(any(name in message for message in messages) for name in world.groups)
    assert len(world.groups) == 30 and 2 <= len(messages) <= 6 and max(map(len, messages)) <= MAX_NOTE_BYTES


@pytest.mark.parametrize("letter", ["a", "é", "模"])
async def test_long_event_has_the_bytes_that_are_allowed(letter: str) -> None:
    """The API server counts bytes. An event may quote the last line of a pod, in any language."""
    kube = FakeKube()
    await EventRecorder(kube, "me").post(make_snapshot(), EventNote("Warning", "PodFailing", letter * MAX_NOTE_BYTES))
    (event,) = kube.of_kind(EVENTS).values()
    assert MAX_NOTE_BYTES - 3 < len(event["note"].encode()) <= MAX_NOTE_BYTES


async def test_rejected_event_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class NoEvents(FakeKube):
        async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
            if resource is EVENTS:
                raise Retry("no room")
            return await super().create(resource, body, dry_run=dry_run)

    world = World(NoEvents(), replicas=1)
    with caplog.at_level(logging.WARNING):
        await world.settle()
    assert world.ready == ("True", "Ready")
    assert "event not posted" in caplog.text
