"""Deferred reconciles and status writes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx_api.conditions import Condition
from phalanx_api.status import GroupStatus, RecoveryStatus, Status
from phalanx_operator.decide.pacing import WRITE_INTERVAL_S, can_defer_write, is_deferrable
from phalanx_operator.decide.state.snapshot import ObservedDeployment, ObservedPod, ObservedRouter
from phalanx_operator.kube.client import PODS, Json, Resource, Retry
from phalanx_operator.observe.observe import ObservedName
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

POD = ObservedPod(name="a-0", index=0, owner_uid="uid-a", ready=False, node="n", uid="1")
READY = replace(POD, ready=True, ready_since="1")


def routers(**fields: Any) -> ObservedDeployment:
    return ObservedDeployment("u", "a-router", replace(ObservedRouter(replicas=1, updated=0, ready=0, is_current=True), **fields))


ROUTERS = routers()


@pytest.mark.parametrize(
    ("former", "now", "is_deferred"),
    [
        pytest.param(None, POD, True, id="a new pod"),
        pytest.param(None, ObservedName("u", "a"), True, id="a new service"),
        pytest.param(POD, READY, True, id="ready"),
        pytest.param(replace(POD, node=""), POD, False, id="placed"),
        pytest.param(replace(POD, node=""), READY, False, id="placed and ready"),
        pytest.param(READY, POD, False, id="no longer ready"),
        pytest.param(POD, replace(READY, uid="2"), False, id="another pod of its name"),
        pytest.param(POD, replace(POD, reason="CrashLoopBackOff"), False, id="failing"),
        pytest.param(POD, None, False, id="deleted"),
        pytest.param(None, None, False, id="nothing"),
        pytest.param(ROUTERS, routers(ready=1, updated=1), True, id="one more ready router"),
        pytest.param(routers(is_current=False), ROUTERS, True, id="router spec observed"),
        pytest.param(routers(ready=1), ROUTERS, False, id="one less ready router"),
        pytest.param(ROUTERS, routers(is_current=False), False, id="router spec changed"),
        pytest.param(routers(updated=1), ROUTERS, False, id="a router is updated"),
        pytest.param(ROUTERS, routers(replicas=2), False, id="routers scaled"),
        pytest.param(ROUTERS, routers(rejection="no room"), False, id="routers rejected"),
        pytest.param(ObservedName("u", "a"), ObservedName("v", "a"), False, id="another owner"),
    ],
)
def test_irrelevant_changes_are_reconciled_later(former: object, now: object, is_deferred: bool) -> None:
    assert is_deferrable(former, now) is is_deferred


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
        pytest.param({"groups": (make_group(phase="Ready", ready_pods=2, nodes=("n", "m")),)}, True, id="a group starts"),
        pytest.param({"groups": (make_group(), make_group(name="b"))}, True, id="another group"),
        pytest.param({"groups": ()}, True, id="a group is deleted"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"message": "2 of 2"}),)}, True, id="a message"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"reason": "Ready"}),)}, False, id="a reason"),
        pytest.param({"conditions": (CONDITION.model_copy(update={"status": "True"}),)}, False, id="a condition"),
        pytest.param({"conditions": ()}, False, id="a condition less"),
        pytest.param({"groups": (make_group(phase="Draining"),)}, False, id="a group is drained"),
        pytest.param({"groups": (make_group(reason="OOMKilled"),)}, False, id="a group has a reason"),
        pytest.param(
            {"groups": (make_group(), make_group(name="b", reason="Unschedulable"))}, False, id="another group has a reason"
        ),
        pytest.param({"groups": (make_group(restarts=1),)}, False, id="a restart"),
        pytest.param({"groups": (make_group(incarnation=2),)}, False, id="an incarnation"),
        pytest.param({"observed_generation": 2}, False, id="spec observed"),
        pytest.param({"restarts": 1}, False, id="restarts"),
        pytest.param({"update_revision": "b"}, False, id="a revision"),
        pytest.param({"recovery": RecoveryStatus(revision="a", last_time="1")}, False, id="recovery"),
    ],
)
def test_only_counts_of_starting_groups_wait_to_be_written(fields: dict[str, Any], waits: bool) -> None:
    assert can_defer_write(make_status(), make_status(**fields)) is waits


class RecentKube(FakeKube):
    """All objects were created recently, however many were written before."""

    def put(self, resource: Resource, body: Json) -> Json:
        created = {"creationTimestamp": "2026-01-02T03:04:00Z"}
        return super().put(resource, body | {"metadata": created | body["metadata"]})


def make_world(write_interval_s: float, **spec: Any) -> World:
    return World(RecentKube(), write_interval_s=write_interval_s, **spec)


def num_status_writes(world: World) -> int:
    return sum("inferenceservices/status" in call for call in world.kube.calls)


async def start_one_by_one(world: World, groups: int) -> None:
    """Starts pods and routers step by step, 0.01 s apart."""
    for _ in range(2 * groups + 2):
        world.cluster.start_pods()
        world.cluster.start_routers()
        await world.reconcile()
        world.clock += 0.01


async def test_starting_groups_cause_few_status_writes() -> None:
    paced, plain = (make_world(pace, replicas=5, parallelism={"tensor": 2, "gpusPerPod": 1}) for pace in (WRITE_INTERVAL_S, 0.0))
    for world in (paced, plain):
        await start_one_by_one(world, 5)
    assert paced.ready == plain.ready == ("True", "Ready")
    assert num_status_writes(paced) <= num_status_writes(plain) / 2
    paced.clock += WRITE_INTERVAL_S
    await paced.reconcile()
    assert paced.status == plain.status


async def make_unready_world() -> World:
    world = make_world(WRITE_INTERVAL_S, replicas=3)
    await world.settle()
    world.cluster.start_pods(ready=False)
    world.clock += WRITE_INTERVAL_S
    await world.reconcile()
    return world


async def test_deferred_status_is_written_in_time() -> None:
    world = await make_unready_world()
    for pod in list(world.kube.of_kind(PODS).values())[:2]:
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        world.clock += 0.25
        writes = await world.reconcile()
    assert writes == [] and world.status.ready_replicas == 1, "the first ready pod made the service available"
    assert world.next_s == WRITE_INTERVAL_S - 0.25
    world.clock += world.next_s
    assert num_status_writes(world) and await world.reconcile() == ["apply inferenceservices/status chat"]
    assert world.status.ready_replicas == 2


async def test_delayed_status_is_written_despite_an_invalid_spec() -> None:
    world = await make_unready_world()
    await apply_step(world, "invalid")
    pods = list(world.kube.of_kind(PODS).values())
    for pod in pods[:2]:
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        world.clock += 0.25
        writes = await world.reconcile()
    assert writes == [] and world.next_s == WRITE_INTERVAL_S - 0.25, (writes, world.next_s)
    world.clock += world.next_s
    assert await world.reconcile() == ["apply inferenceservices/status chat"]
    assert world.status.ready_replicas == 2


STEPS = st.lists(
    st.sampled_from(["pods", "unready", "routers", "one", "three", "engine", "invalid", "delete", "crash", "wait"]), max_size=12
)


async def apply_step(world: World, step: str) -> None:
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
        case "delete" if pods := sorted(kube.of_kind(PODS)):
            del kube.objects["pods", "team", pods[0]]
        case "crash":
            world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
        case "wait":
            world.clock += WRITE_INTERVAL_S
    try:
        await world.reconcile()
    except Retry:
        pass


def verdicts(world: World) -> list[tuple[str, str, str]]:
    return [(condition.type, condition.status, condition.reason) for condition in world.status.conditions]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
@example(["unready", "invalid"])
@example(["pods", "engine", "pods", "pods", "invalid"])
async def test_delay_changes_no_condition_action_or_final_status(steps: list[str]) -> None:
    """Counters that depend on the spec keep their last value while the spec is invalid."""
    paced, plain = make_world(WRITE_INTERVAL_S, replicas=2), make_world(0.0, replicas=2)
    for number, step in enumerate(["wait", *steps]):
        actions = []
        for world in (paced, plain):
            world.kube.calls.clear()
            await apply_step(world, step)
            actions.append([c for c in world.kube.calls if "events" not in c and "inferenceservices/status" not in c])
        assert actions[0] == actions[1], (number, step)
        assert verdicts(paced) == verdicts(plain), (number, step)
        assert paced.events() == plain.events(), (number, step)
    for world in (paced, plain):
        await apply_step(world, "wait")
    spec_counters = ("available_replicas", "updated_replicas", "draining_replicas") if "invalid" in steps else ()
    assert paced.status.model_copy(update={name: getattr(plain.status, name) for name in spec_counters}) == plain.status
