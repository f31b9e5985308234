"""A rollout that goes back by itself: `rollout.onFailure: Rollback`."""

import json
from typing import Any

import msgspec
import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.apply.owned import APPLY_AGAIN_S
from phalanx_operator.kube.client import CONFIG_MAPS, DEPLOYMENTS, PODS, STATEFUL_SETS
from phalanx_operator.render import revision as former
from phalanx_operator.render.revision import revision
from tests.control.builders import NOW, make_service
from tests.control.loop.test_rollout_strategies import LONG_AFTER, leave_unplaced, revisions, settled
from tests.control.worlds import World

ROLLOUT = {"maxUnavailable": 2, "progressDeadlineSeconds": 3600, "onFailure": "Rollback"}
BAD = {"maxModelLen": 512}


def of(world: World) -> str:
    """The revision of the spec as it is."""
    return revision(make_service(**world.service["spec"]))


async def run_late(world: World, rollout: dict[str, Any] | None = None) -> None:
    """The newest groups do not come to serve until the deadline is over; the others serve. rollout: what it is by then."""
    first = world.groups
    await world.look()
    await world.look()
    world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
    for name in first & world.groups - world.deleted():
        pod = world.kube.of(PODS)[f"{name}-0"]
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    world.now = LONG_AFTER
    if rollout:
        await world.change(rollout=rollout)
    await world.look()


def newer(world: World, old: set[str]) -> set[str]:
    """Groups that are there, and stay, and were not then."""
    return world.groups - old - world.deleted()


def set_pod(world: World, group: str, **status: Any) -> None:
    """The only pod of this group has not been ready since the beginning."""
    pod = world.kube.of(PODS)[f"{group}-0"]
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": NOW}
    world.kube.put(PODS, pod | {"status": {"conditions": [condition], **status}})


async def test_late_revision_rolls_back_to_the_last_complete_one() -> None:
    world = await settled(replicas=3, rollout=ROLLOUT, engine={"dtype": "float32"})
    good, first = of(world), world.groups
    await world.change(engine=BAD)
    bad = of(world)
    await run_late(world)
    note = world.status.rollback
    assert note and (note.revision, note.to) == (bad, good) and "CrashLoopBackOff" in note.message
    assert world.condition("Stalled") == ("True", "RolledBack")
    await world.settle()
    assert revisions(world) == {good: 3}
    assert first & world.groups, "the one that served all the time is the same"
    args = {tuple(one["spec"]["template"]["spec"]["containers"][0]["args"]) for one in world.kube.of(STATEFUL_SETS).values()}
    assert all("float32" in words and "512" not in words for words in args), "made anew as it was"
    assert (world.ready, world.condition("Progressing")) == (("False", "RolledBack"), ("False", "RolledBack"))
    assert world.condition("Available") == ("True", "Serving")
    status = world.status
    assert (status.current_revision, status.update_revision, status.updated_replicas) == (good, bad, 0)
    assert (status.replicas, status.ready_replicas) == (3, 3)
    assert ("Warning", "RolledBack") in world.notes()
    assert await world.look() == [], "it stays so, and costs nothing"


@pytest.mark.parametrize("keeps", [{"partition": 3}, {"paused": True}], ids=["partition", "paused"])
async def test_constraints_keep_no_group_on_a_given_up_revision(keeps: dict[str, Any]) -> None:
    world = await settled(replicas=4, rollout=ROLLOUT)
    good = of(world)
    await world.change(engine=BAD)
    await run_late(world, ROLLOUT | keeps)
    await world.settle()
    assert revisions(world) == {good: 4} and world.condition("Stalled") == ("True", "RolledBack")


async def test_status_after_rollback_is_not_rewritten() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    before = world.status
    for second in range(1, 5):
        world.now = LONG_AFTER.replace("00Z", f"{second:02}Z")
        assert await world.look() == []
    assert world.status == before


async def test_stalled_transition_time_is_kept_during_rollback() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    assert world.ready[0] == "False"
    world.now = LONG_AFTER.replace("00Z", "07Z")
    await world.look()
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and stalled.last_transition_time == LONG_AFTER


async def test_rollback_without_surge_capacity_deletes_first() -> None:
    world = await settled(replicas=3, rollout=ROLLOUT | {"maxUnavailable": 1, "maxSurge": 1, "surgeTimeoutSeconds": 60})
    good, first = of(world), world.groups
    await world.change(engine=BAD)
    for _ in range(12):
        await world.look()
        if len(newer(world, first)) == 2:
            break
        world.cluster.start_pods()
    world.cluster.start_pods()
    late = sorted(newer(world, first))[0]
    set_pod(world, late)
    before, world.now = set(world.groups), LONG_AFTER
    await world.look()
    assert world.status.rollback and late in world.deleted()
    for _ in range(3):
        world.cluster.start_pods()
        if newer(world, before):
            break
        await world.look()
    surge = newer(world, before)
    assert len(surge) == 1
    leave_unplaced(world, surge, world.now)
    world.now = LONG_AFTER.replace("09:00", "09:02")
    await world.look()
    assert world.deleted() == surge and world.condition("Progressing") == ("True", "SurgeUnschedulable")
    made = 0
    for _ in range(8):
        world.cluster.start_pods()
        await world.look()
        assert len(world.groups - world.deleted()) <= 3, "no surge any more"
        made += len(newer(world, before))
    await world.settle()
    assert made > 0 and revisions(world) == {good: 3}


async def test_early_crashing_revision_rolls_back_too() -> None:
    """With the defaults: each group spends its restarts within minutes, and a successor has its time anew."""
    world = await settled(replicas=2, rollout={"onFailure": "Rollback"})
    good, first = of(world), world.groups
    await world.change(engine=BAD)
    bad, counts, seconds = of(world), dict[str, int](), 0
    while not world.status.rollback and seconds < 1800:
        world.cluster.start_pods()
        for name in newer(world, first):
            counts[name] = counts.get(name, 0) + 1
            ended = {"terminated": {"reason": "Error", "exitCode": 1}}
            state = {
                "name": "engine",
                "restartCount": counts[name],
                "lastState": ended,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            }
            set_pod(world, name, containerStatuses=[state])
        seconds += 30
        world.now = f"2026-01-02T03:{5 + seconds // 60:02}:{seconds % 60:02}Z"
        await world.look()
    note = world.status.rollback
    assert note and (note.revision, note.to) == (bad, good) and "it was restarted 6 times" in note.message
    assert len(counts) == 2, "the second that is given up says enough"
    await world.settle()
    assert revisions(world) == {good: 2} and world.condition("Stalled") == ("True", "RolledBack")


async def test_missing_record_of_a_followed_revision_changes_nothing() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT | {"canaryWeight": 10})
    good = of(world)
    await world.change(engine=BAD)
    bad = of(world)
    await run_late(world)
    await world.settle()
    note, record = world.status.rollback, world.kube.objects.pop(("configmaps", "team", "chat-former"))
    await world.change(replicas=3)
    await world.settle()
    assert revisions(world) == {good: 2} and world.status.rollback == note, "the revision that failed is not tried again"
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and stalled.reason == "RolledBack" and "there is no record of a revision" in stalled.message
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (bad, 0)
    assert world.next_s is not None and world.next_s <= 30.0
    world.kube.put(CONFIG_MAPS, record)
    await world.settle()
    assert revisions(world) == {good: 3}


async def test_new_spec_is_tried_and_removes_the_note() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    assert world.ready == ("False", "RolledBack")
    await world.change(engine={"maxModelLen": 1024})
    await world.settle(20)
    assert world.ready == ("True", "Ready") and world.status.rollback is None
    assert revisions(world) == {of(world): 2}
    assert find_condition(world.status.conditions, "Stalled") is None


async def test_rolled_back_service_resumes_its_revision_when_paused() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(rollout=ROLLOUT | {"onFailure": "Pause"})
    await world.settle(20)
    assert revisions(world) == {of(world): 2} and world.status.rollback is None


async def test_groups_added_after_rollback_use_the_former_revision() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    good = of(world)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(replicas=4)
    await world.settle()
    assert revisions(world) == {good: 4}


@pytest.mark.parametrize("loss", ["record", "stranger", "nonsense"])
async def test_rollback_without_record_pauses_with_a_reason(loss: str) -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    record = world.kube.of(CONFIG_MAPS)["chat-former"]
    await world.change(engine=BAD)
    match loss:
        case "record":
            del world.kube.objects["configmaps", "team", "chat-former"]
        case "stranger":
            world.kube.put(CONFIG_MAPS, record | {"metadata": record["metadata"] | {"ownerReferences": []}})
        case "nonsense":
            world.kube.put(CONFIG_MAPS, record | {"data": record["data"] | {"spec": "{"}})
    await run_late(world)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and "there is no record of a revision" in stalled.message
    assert world.status.rollback is None


async def test_foreign_object_named_like_the_record_prevents_only_rollback() -> None:
    stranger = {"metadata": {"name": "chat-former", "namespace": "team", "uid": "theirs"}, "data": {"mine": "1"}}
    world = World(replicas=1, rollout=ROLLOUT)
    world.kube.put(CONFIG_MAPS, stranger)
    await world.settle()
    assert world.ready == ("True", "Ready")
    await world.change(replicas=2)
    await world.settle()
    assert (len(world.groups), world.ready) == (2, ("True", "Ready"))
    await world.change(engine=BAD)
    await run_late(world)
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and "there is no record of a revision" in stalled.message
    assert world.kube.of(CONFIG_MAPS)["chat-former"]["data"] == {"mine": "1"}


async def test_a_first_revision_has_nothing_to_go_back_to() -> None:
    world = World(replicas=1, rollout=ROLLOUT)
    await world.look()
    world.cluster.start_pods(ready=False)
    world.now = LONG_AFTER
    await world.look()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert world.status.rollback is None


async def test_only_services_that_may_go_back_keep_a_record() -> None:
    world = await settled(replicas=1)
    assert "chat-former" not in world.kube.of(CONFIG_MAPS)
    await world.change(rollout=ROLLOUT)
    await world.look()
    assert world.kube.of(CONFIG_MAPS)["chat-former"]["data"]["revision"] == of(world)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"servedNames": ["a"]},
        {"podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [{"operator": "Exists"}]}}},
        {"engine": {"image": "other:2", "speculative": {"method": "NGram"}}, "parallelism": {"tensor": 2}},
        {"model": {"uri": "s3://bucket/x", "cache": {"type": "Shared", "claimName": "c", "readOnly": True}}},
        {"placement": {"nodeSelector": {"pool": "a"}, "gang": {"mode": "None"}}},
        {"rollout": {"restartId": "a", "partition": 2}},
    ],
    ids=["least", "names", "overlay", "engine", "model", "placement", "restart"],
)
def test_record_yields_the_same_revision(spec: dict[str, Any]) -> None:
    then = make_service(**spec)
    record = former.record(then, revision(then))
    changed = make_service(replicas=7, servedNames=["other"], engine={"maxModelLen": 9}, rollout={"restartId": "b"})
    now = former.recalled(changed, record, revision(then))
    assert now and revision(now) == revision(then) and now.served_names == then.served_names
    assert now.spec.replicas == 7, "what makes no revision is as it is now"
    written = json.loads(record["data"]["spec"]) | {"later": True}
    later = former.recalled(changed, record | {"data": record["data"] | {"spec": json.dumps(written)}}, revision(then))
    assert later == now, "a later version of the operator may have written it"
    assert former.recalled(changed, record, "another") is None


async def test_given_up_revision_gets_no_requests() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT | {"canaryWeight": 10})
    good = of(world)
    await world.change(engine=BAD, rollout=ROLLOUT | {"canaryWeight": 10, "restartId": "again"})
    await world.look()
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (of(world), 10)
    text = world.kube.of(CONFIG_MAPS)["chat-policy"]["data"]["policy.json"]
    assert msgspec.json.decode(text)["canary"] == of(world), "routers that never heard the operator know it too"
    await run_late(world)
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (good, 100), "all are for the one before"
    told = msgspec.json.decode(world.kube.of(CONFIG_MAPS)["chat-policy"]["data"]["policy.json"])
    assert (told["canary"], told["canary_percent"]) == (good, 100)


def names_of(world: World) -> list[str]:
    """By which clients ask routers for the model."""
    (deployment,) = world.kube.of(DEPLOYMENTS).values()
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return list(words[words.index("--served-model-name") + 1 :])


async def test_missing_record_keeps_routers_unchanged() -> None:
    """Groups answer to the names of the former revision, which nobody knows: those of the newest would be wrong."""
    world = await settled(replicas=2, rollout=ROLLOUT, servedNames=["good"])
    await world.change(engine=BAD, servedNames=["bad"])
    await run_late(world)
    await world.settle()
    assert names_of(world) == ["good"]
    record = world.kube.objects.pop(("configmaps", "team", "chat-former"))
    world.clock += APPLY_AGAIN_S + 1
    await world.settle()
    assert names_of(world) == ["good"] and world.condition("Stalled") == ("True", "RolledBack")
    world.kube.objects.pop(("deployments", "team", "chat-router"))
    await world.settle()
    assert names_of(world) == ["bad"], "none at all would be worse"
    world.kube.put(CONFIG_MAPS, record)
    await world.settle()
    assert names_of(world) == ["good"]
