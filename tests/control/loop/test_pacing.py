"""What waits a moment, and what never does."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx_api.conditions import Condition
from phalanx_api.status import GroupStatus, RecoveryStatus, Status
from phalanx_operator.decide.pacing import PACE_S, is_calm, may_wait
from phalanx_operator.decide.state.snapshot import ObservedDeployment, ObservedPod, ObservedRouter
from phalanx_operator.kube.client import PODS, Json, Resource, Retry
from phalanx_operator.observe.observe import ObservedName
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

POD = ObservedPod(name="a-0", index=0, owner_uid="uid-a", ready=False, node="n", uid="1")
READY = replace(POD, ready=True, ready_since="1")


def routers(**fields: Any) -> ObservedDeployment:
    return ObservedDeployment("u", "a-router", replace(ObservedRouter(wanted=1, updated=0, ready=0, current=True), **fields))


ROUTERS = routers()


@pytest.mark.parametrize(
    ("former", "now", "calm"),
    [
        pytest.param(None, POD, True, id="a new pod"),
        pytest.param(None, ObservedName("u", "a"), True, id="a new service"),
        pytest.param(POD, READY, True, id="it is ready"),
        pytest.param(replace(POD, node=""), POD, False, id="it has a node"),
        pytest.param(replace(POD, node=""), READY, False, id="a node and ready at once"),
        pytest.param(READY, POD, False, id="it is ready no more"),
        pytest.param(POD, replace(READY, uid="2"), False, id="another pod of its name"),
        pytest.param(POD, replace(POD, reason="CrashLoopBackOff"), False, id="trouble"),
        pytest.param(POD, None, False, id="it is gone"),
        pytest.param(None, None, False, id="nothing"),
        pytest.param(ROUTERS, routers(ready=1, updated=1), True, id="a router more is ready"),
        pytest.param(routers(current=False), ROUTERS, True, id="the spec of the routers was seen"),
        pytest.param(routers(ready=1), ROUTERS, False, id="a router less is ready"),
        pytest.param(ROUTERS, routers(current=False), False, id="the routers are to be others"),
        pytest.param(routers(updated=1), ROUTERS, False, id="a router is of another version"),
        pytest.param(ROUTERS, routers(wanted=2), False, id="somebody scaled the routers"),
        pytest.param(ROUTERS, routers(refused="no room"), False, id="routers are refused"),
        pytest.param(ObservedName("u", "a"), ObservedName("v", "a"), False, id="another owner"),
    ],
)
def test_irrelevant_changes_are_reconciled_later(former: object, now: object, calm: bool) -> None:
    assert is_calm(former, now) is calm


def make_status(**fields: Any) -> Status:
    ready = Condition(type="Ready", status="False", reason="GroupsNotReady", message="1 of 2", last_transition_time="1")
    groups = (GroupStatus(name="a", phase="Starting", pods=2),)
    return Status(observed_generation=1, replicas=1, groups=groups, conditions=(ready,)).model_copy(update=fields)


def make_group(**fields: Any) -> GroupStatus:
    return GroupStatus(name="a", phase="Starting", pods=2).model_copy(update=fields)


CONDITION = make_status().conditions[0]


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        pytest.param({"ready_replicas": 1, "available_replicas": 1, "replicas": 2, "updated_replicas": 2}, True, id="counts"),
        pytest.param({"groups": (make_group(phase="Ready", ready_pods=2, nodes=("n", "m")),)}, True, id="a group comes up"),
        pytest.param({"groups": (make_group(), make_group(name="b"))}, True, id="another group"),
        pytest.param({"groups": ()}, True, id="a group is gone"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"message": "2 of 2"}),)}, True, id="a message"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"reason": "Ready"}),)}, False, id="a reason"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"status": "True"}),)}, False, id="a condition"),
        pytest.param({"conditions": ()}, False, id="a condition less"),
        pytest.param({"groups": (make_group(phase="Draining"),)}, False, id="a group is drained"),
        pytest.param({"groups": (make_group(reason="OOMKilled"),)}, False, id="a group says why"),
        pytest.param({"groups": (make_group(), make_group(name="b", reason="Unschedulable"))}, False, id="another one says why"),
        pytest.param({"groups": (make_group(restarts=1),)}, False, id="a restart"),
        pytest.param({"groups": (make_group(incarnation=2),)}, False, id="an incarnation"),
        pytest.param({"observed_generation": 2}, False, id="the spec was seen"),
        pytest.param({"restarts": 1}, False, id="restarts"),
        pytest.param({"update_revision": "b"}, False, id="a revision"),
        pytest.param({"recovery": RecoveryStatus(revision="a", last_time="1")}, False, id="what is remembered"),
    ],
)
def test_only_counts_of_starting_groups_wait_to_be_written(fields: dict[str, Any], waits: bool) -> None:
    assert may_wait(make_status(), make_status(**fields)) is waits


class Still(FakeKube):
    """Made a moment ago, all of it, however much was written before."""

    def put(self, resource: Resource, body: Json) -> Json:
        made = {"creationTimestamp": "2026-01-02T03:04:00Z"}
        return super().put(resource, body | {"metadata": made | body["metadata"]})


def make_world(pace_s: float, **spec: Any) -> World:
    return World(Still(), pace_s=pace_s, **spec)


def writes_of(world: World) -> int:
    return sum("inferenceservices/status" in call for call in world.kube.calls)


async def _come_up(world: World, groups: int) -> None:
    """The groups get their pods one after another, each within a hundredth of a second."""
    for _ in range(2 * groups + 2):
        world.cluster.start_pods()
        world.cluster.start_routers()
        await world.look()
        world.clock += 0.01


async def test_starting_groups_cause_few_status_writes() -> None:
    paced, plain = (make_world(pace, replicas=5, parallelism={"tensor": 2, "gpusPerPod": 1}) for pace in (PACE_S, 0.0))
    for world in (paced, plain):
        await _come_up(world, 5)
    assert paced.ready == plain.ready == ("True", "Ready")
    assert writes_of(paced) <= writes_of(plain) / 2
    paced.clock += PACE_S
    await paced.look()
    assert paced.status == plain.status


async def _world_whose_pods_are_to_be_ready() -> World:
    world = make_world(PACE_S, replicas=3)
    await world.settle()
    world.cluster.start_pods(ready=False)
    world.clock += PACE_S
    await world.look()
    return world


async def test_a_status_that_waits_is_written_in_time() -> None:
    world = await _world_whose_pods_are_to_be_ready()
    for pod in list(world.kube.of(PODS).values())[:2]:
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        world.clock += 0.25
        writes = await world.look()
    assert writes == [] and world.status.ready_replicas == 1, "the first one made the service available"
    assert world.next_s == PACE_S - 0.25
    world.clock += world.next_s
    assert writes_of(world) and await world.look() == ["apply inferenceservices/status chat"]
    assert world.status.ready_replicas == 2


async def test_delayed_status_is_written_despite_an_invalid_spec() -> None:
    world = await _world_whose_pods_are_to_be_ready()
    await _step(world, "invalid")
    pods = list(world.kube.of(PODS).values())
    for pod in pods[:2]:
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        world.clock += 0.25
        writes = await world.look()
    assert writes == [] and world.next_s == PACE_S - 0.25, (writes, world.next_s)
    world.clock += world.next_s
    assert await world.look() == ["apply inferenceservices/status chat"]
    assert world.status.ready_replicas == 2


STEPS = st.lists(
    st.sampled_from(["pods", "unready", "routers", "one", "three", "engine", "invalid", "delete", "crash", "wait"]), max_size=12
)


async def _step(world: World, step: str) -> None:
    kube = world.kube
    match step:
        case "pods" | "unready":
            world.cluster.start_pods(ready=step == "pods")
        case "routers":
            world.cluster.start_routers()
        case "one" | "three":
            await world.change(replicas=1 if step == "one" else 3)
        case "engine":
            await world.change(engine={"maxModelLen": 512})
        case "invalid":
            await world.change(parallelism={"tensor": 3, "gpusPerPod": 2})
        case "delete" if pods := sorted(kube.of(PODS)):
            del kube.objects["pods", "team", pods[0]]
        case "crash":
            world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
        case "wait":
            world.clock += PACE_S
    try:
        await world.look()
    except Retry:
        pass


def _told(world: World) -> list[tuple[str, str, str]]:
    return [(condition.type, condition.status, condition.reason) for condition in world.status.conditions]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
@example(["unready", "invalid"])
async def test_delay_changes_no_condition_action_or_final_status(steps: list[str]) -> None:
    """What is counted against the spec stays as it was last written while the spec is not valid."""
    paced, plain = make_world(PACE_S, replicas=2), make_world(0.0, replicas=2)
    for number, step in enumerate(["wait", *steps]):
        done = []
        for world in (paced, plain):
            world.kube.calls.clear()
            await _step(world, step)
            done.append([c for c in world.kube.calls if "events" not in c and "inferenceservices/status" not in c])
        assert done[0] == done[1], (number, step)
        assert _told(paced) == _told(plain), (number, step)
        assert paced.notes() == plain.notes(), (number, step)
    for world in (paced, plain):
        await _step(world, "wait")
    against_the_spec = ("available_replicas", "updated_replicas") if "invalid" in steps else ()
    assert paced.status.model_copy(update={name: getattr(plain.status, name) for name in against_the_spec}) == plain.status
