"""Automatic rollback: `rollout.onFailure: Rollback`."""

import json
from typing import Any

import msgspec
import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.kube.client import CONFIG_MAPS, DEPLOYMENTS, PODS, STATEFUL_SETS
from phalanx_operator.render import revision as revisions_module
from phalanx_operator.render.revision import revision
from tests.control.builders import NOW, make_service
from tests.control.loop.scenes import LONG_AFTER, leave_unplaced, revisions, settled_world
from tests.control.summaries import summary
from tests.control.worlds import World

ROLLOUT = {"maxUnavailable": 2, "progressDeadlineSeconds": 3600, "onFailure": "Rollback"}
BAD = {"maxModelLen": 512}


def revision_of(world: World) -> str:
    """Returns the revision of the current spec."""
    return revision(make_service(**world.service["spec"]))


async def make_late(world: World) -> None:
    """Keeps the newest groups unready past the deadline, with the others ready."""
    first = world.groups
    await world.reconcile()
    await world.reconcile()
    world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
    for name in first & world.groups - world.deleted():
        pod = world.kube.of_kind(PODS)[f"{name}-0"]
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    world.now = LONG_AFTER


async def run_late(world: World, **spec: Any) -> list[str]:
    """Makes the newest groups late and changes these fields. Returns the writes of the reconcile after the deadline."""
    await make_late(world)
    if spec:
        await world.change(**spec)
    return await world.reconcile()


def newer(world: World, old: set[str]) -> set[str]:
    """Returns the live groups that are not in `old`."""
    return world.groups - old - world.deleted()


def make_unready(world: World, group: str, **status: Any) -> None:
    """Makes the only pod of a group unready since `NOW`."""
    pod = world.kube.of_kind(PODS)[f"{group}-0"]
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": NOW}
    world.kube.put(PODS, pod | {"status": {"conditions": [condition], **status}})


async def test_late_revision_rolls_back_to_the_last_complete_one() -> None:
    world = await settled_world(replicas=3, rollout=ROLLOUT, engine={"dtype": "float32"})
    good, first = revision_of(world), world.groups
    await world.change(engine=BAD)
    bad = revision_of(world)
    await run_late(world)
    note = world.status.rollback
    assert note and (note.revision, note.to) == (bad, good) and "CrashLoopBackOff" in note.message
    assert world.condition("Stalled") == ("True", "RolledBack")
    await world.settle()
    assert revisions(world) == {good: 3}
    assert first & world.groups, "the ready group is kept"
    args = {
        tuple(body["spec"]["template"]["spec"]["containers"][0]["args"]) for body in world.kube.of_kind(STATEFUL_SETS).values()
    }
    assert all("float32" in words and "512" not in words for words in args), "the former spec"
    assert (world.ready, world.condition("Progressing")) == (("False", "RolledBack"), ("False", "RolledBack"))
    assert world.condition("Available") == ("True", "Serving")
    status = world.status
    assert (status.current_revision, status.update_revision, status.updated_replicas) == (good, bad, 0)
    assert (status.replicas, status.ready_replicas) == (3, 3)
    assert ("Warning", "RolledBack") in world.events()
    assert await world.reconcile() == [], "no further writes"


async def test_rollback_is_recorded_before_its_actions() -> None:
    """Without the late group and without the record, the revision would be rolled out again."""
    world = await settled_world(replicas=3, rollout=ROLLOUT)
    await world.change(engine=BAD)
    writes = await run_late(world)
    recorded = writes.index("apply inferenceservices/status chat")
    assert recorded < min(writes.index(write) for write in writes if write.startswith("delete statefulsets"))
    assert writes.count("apply inferenceservices/status chat") == 2, "of the record, and of the actions"


async def test_rollback_and_autoscaler_write_in_one_reconcile() -> None:
    world = await settled_world(replicas=3, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await make_late(world)
    world.cluster.start_router_pods()
    world.routers.summary = summary()
    await world.change(autoscaling={"minReplicas": 4, "maxReplicas": 9, "targets": {"ttftP95Ms": 2000}})
    assert "merge inferenceservices/scale chat" in await world.reconcile(), "the autoscaler writes with the rollback"
    assert world.status.rollback is not None
    assert world.service["spec"]["replicas"] == 4
    assert world.condition("ScalingActive") == ("True", "Active")


@pytest.mark.parametrize("constraint", [{"partition": 3}, {"paused": True}], ids=["partition", "paused"])
async def test_constraints_keep_no_group_on_a_given_up_revision(constraint: dict[str, Any]) -> None:
    world = await settled_world(replicas=4, rollout=ROLLOUT)
    good = revision_of(world)
    await world.change(engine=BAD)
    await run_late(world, rollout=ROLLOUT | constraint)
    await world.settle()
    assert revisions(world) == {good: 4} and world.condition("Stalled") == ("True", "RolledBack")


async def test_status_after_rollback_is_not_rewritten() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    before = world.status
    for second in range(1, 5):
        world.now = LONG_AFTER.replace("00Z", f"{second:02}Z")
        assert await world.reconcile() == []
    assert world.status == before


async def test_stalled_transition_time_is_kept_during_rollback() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    assert world.ready[0] == "False"
    world.now = LONG_AFTER.replace("00Z", "07Z")
    await world.reconcile()
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and stalled.last_transition_time == LONG_AFTER


async def test_rollback_without_surge_capacity_deletes_first() -> None:
    world = await settled_world(replicas=3, rollout=ROLLOUT | {"maxUnavailable": 1, "maxSurge": 1, "surgeTimeoutSeconds": 60})
    good, first = revision_of(world), world.groups
    await world.change(engine=BAD)
    for _ in range(12):
        await world.reconcile()
        if len(newer(world, first)) == 2:
            break
        world.cluster.start_pods()
    world.cluster.start_pods()
    late = sorted(newer(world, first))[0]
    make_unready(world, late)
    before, world.now = set(world.groups), LONG_AFTER
    await world.reconcile()
    assert world.status.rollback and late in world.deleted()
    for _ in range(3):
        world.cluster.start_pods()
        if newer(world, before):
            break
        await world.reconcile()
    surge = newer(world, before)
    assert len(surge) == 1
    leave_unplaced(world, surge, world.now)
    world.now = LONG_AFTER.replace("09:00", "09:02")
    await world.reconcile()
    assert world.deleted() == surge and world.condition("Progressing") == ("True", "SurgeUnschedulable")
    created = 0
    for _ in range(8):
        world.cluster.start_pods()
        await world.reconcile()
        assert len(world.groups - world.deleted()) <= 3, "no surge"
        created += len(newer(world, before))
    await world.settle()
    assert created > 0 and revisions(world) == {good: 3}


async def test_early_crashing_revision_rolls_back_too() -> None:
    """By default each group exceeds its restart budget within minutes, and its successor gets a new deadline."""
    world = await settled_world(replicas=2, rollout={"onFailure": "Rollback"})
    good, first = revision_of(world), world.groups
    await world.change(engine=BAD)
    bad, counts, seconds = revision_of(world), dict[str, int](), 0
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
            make_unready(world, name, containerStatuses=[state])
        seconds += 30
        world.now = f"2026-01-02T03:{5 + seconds // 60:02}:{seconds % 60:02}Z"
        await world.reconcile()
    note = world.status.rollback
    assert note and (note.revision, note.to) == (bad, good) and "it was restarted 6 times" in note.message
    assert len(counts) == 2, "after the second lost group"
    await world.settle()
    assert revisions(world) == {good: 2} and world.condition("Stalled") == ("True", "RolledBack")


async def test_missing_record_of_a_followed_revision_changes_nothing() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT | {"canaryWeight": 10})
    good = revision_of(world)
    await world.change(engine=BAD)
    bad = revision_of(world)
    await run_late(world)
    await world.settle()
    note, record = world.status.rollback, world.kube.objects.pop(("configmaps", "team", "chat-former"))
    await world.change(replicas=3)
    await world.settle()
    assert revisions(world) == {good: 2} and world.status.rollback == note, "the failed revision is not retried"
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and stalled.reason == "RolledBack" and "is stored" in stalled.message
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (bad, 0)
    assert world.next_s is not None and world.next_s <= 30.0
    world.kube.put(CONFIG_MAPS, record)
    await world.settle()
    assert revisions(world) == {good: 3}


async def test_new_spec_removes_the_rollback() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    assert world.ready == ("False", "RolledBack")
    await world.change(engine={"maxModelLen": 1024})
    await world.settle(20)
    assert world.ready == ("True", "Ready") and world.status.rollback is None
    assert revisions(world) == {revision_of(world): 2}
    assert find_condition(world.status.conditions, "Stalled") is None


async def test_rolled_back_service_resumes_its_revision_when_paused() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(rollout=ROLLOUT | {"onFailure": "Pause"})
    await world.settle(20)
    assert revisions(world) == {revision_of(world): 2} and world.status.rollback is None


async def test_groups_added_after_rollback_use_the_former_revision() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    good = revision_of(world)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(replicas=4)
    await world.settle()
    assert revisions(world) == {good: 4}


@pytest.mark.parametrize("loss", ["deleted", "foreign", "invalid"])
async def test_rollback_without_record_pauses_with_a_reason(loss: str) -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT)
    record = world.kube.of_kind(CONFIG_MAPS)["chat-former"]
    await world.change(engine=BAD)
    match loss:
        case "deleted":
            del world.kube.objects["configmaps", "team", "chat-former"]
        case "foreign":
            world.kube.put(CONFIG_MAPS, record | {"metadata": record["metadata"] | {"ownerReferences": []}})
        case "invalid":
            world.kube.put(CONFIG_MAPS, record | {"data": record["data"] | {"spec": "{"}})
    await run_late(world)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and "is stored" in stalled.message
    assert world.status.rollback is None


async def test_foreign_object_named_like_the_record_prevents_only_rollback() -> None:
    foreign = {"metadata": {"name": "chat-former", "namespace": "team", "uid": "foreign"}, "data": {"own": "1"}}
    world = World(replicas=1, rollout=ROLLOUT)
    world.kube.put(CONFIG_MAPS, foreign)
    await world.settle()
    assert world.ready == ("True", "Ready")
    await world.change(replicas=2)
    await world.settle()
    assert (len(world.groups), world.ready) == (2, ("True", "Ready"))
    await world.change(engine=BAD)
    await run_late(world)
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and "is stored" in stalled.message
    assert world.kube.of_kind(CONFIG_MAPS)["chat-former"]["data"] == {"own": "1"}


async def test_first_revision_has_no_rollback() -> None:
    world = World(replicas=1, rollout=ROLLOUT)
    await world.reconcile()
    world.cluster.start_pods(ready=False)
    world.now = LONG_AFTER
    await world.reconcile()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert world.status.rollback is None


async def test_record_exists_only_with_rollback() -> None:
    world = await settled_world(replicas=1)
    assert "chat-former" not in world.kube.of_kind(CONFIG_MAPS)
    await world.change(rollout=ROLLOUT)
    await world.reconcile()
    assert world.kube.of_kind(CONFIG_MAPS)["chat-former"]["data"]["revision"] == revision_of(world)


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
    ids=["minimal", "names", "overlay", "engine", "model", "placement", "restart"],
)
def test_record_yields_the_same_revision(spec: dict[str, Any]) -> None:
    former = make_service(**spec)
    record = revisions_module.revision_record(former, revision(former))
    changed = make_service(replicas=7, servedNames=["other"], engine={"maxModelLen": 9}, rollout={"restartId": "b"})
    now = revisions_module.recall(changed, record, revision(former))
    assert now and revision(now) == revision(former) and now.served_names == former.served_names
    assert now.spec.replicas == 7, "fields outside the revision are the current ones"
    written = json.loads(record["data"]["spec"]) | {"later": True}
    later = revisions_module.recall(changed, record | {"data": record["data"] | {"spec": json.dumps(written)}}, revision(former))
    assert later == now, "a record of a later operator version is readable"
    assert revisions_module.recall(changed, record, "another") is None


async def test_given_up_revision_gets_no_requests() -> None:
    world = await settled_world(replicas=2, rollout=ROLLOUT | {"canaryWeight": 10})
    good = revision_of(world)
    await world.change(engine=BAD, rollout=ROLLOUT | {"canaryWeight": 10, "restartId": "again"})
    await world.reconcile()
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (revision_of(world), 10)
    text = world.kube.of_kind(CONFIG_MAPS)["chat-policy"]["data"]["policy.json"]
    assert msgspec.json.decode(text)["canary"] == revision_of(world), "the ConfigMap has it too"
    await run_late(world)
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (good, 100), (
        "all requests are for the former one"
    )
    policy = msgspec.json.decode(world.kube.of_kind(CONFIG_MAPS)["chat-policy"]["data"]["policy.json"])
    assert (policy["canary"], policy["canary_percent"]) == (good, 100)


def served_names(world: World) -> list[str]:
    """Returns the model names that routers serve."""
    (deployment,) = world.kube.of_kind(DEPLOYMENTS).values()
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return list(words[words.index("--served-model-name") + 1 :])


async def test_missing_record_keeps_routers_unchanged() -> None:
    """Groups use the names of the former revision, which are unknown; the newest ones would be wrong."""
    world = await settled_world(replicas=2, rollout=ROLLOUT, servedNames=["good"])
    await world.change(engine=BAD, servedNames=["bad"])
    await run_late(world)
    await world.settle()
    assert served_names(world) == ["good"]
    record = world.kube.objects.pop(("configmaps", "team", "chat-former"))
    world.clock += REAPPLY_S + 1
    await world.settle()
    assert served_names(world) == ["good"] and world.condition("Stalled") == ("True", "RolledBack")
    world.kube.objects.pop(("deployments", "team", "chat-router"))
    await world.settle()
    assert served_names(world) == ["bad"], "no router would be worse"
    world.kube.put(CONFIG_MAPS, record)
    await world.settle()
    assert served_names(world) == ["good"]
