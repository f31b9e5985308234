"""A rollout that goes back by itself: `rollout.onFailure: Rollback`."""

import json
from typing import Any

import msgspec
import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.kube import CONFIG_MAPS, PODS, STATEFUL_SETS
from phalanx_operator.render import former
from phalanx_operator.render.revision import revision
from tests.control.builders import make_service
from tests.control.test_rollout_strategies import LONG_AFTER, revisions, settled
from tests.control.worlds import World

ROLLOUT = {"maxUnavailable": 2, "progressDeadlineSeconds": 3600, "onFailure": "Rollback"}
BAD = {"maxModelLen": 512}


def of(world: World) -> str:
    """The revision of the spec as it is."""
    return revision(make_service(**world.service["spec"]))


async def run_late(world: World) -> None:
    """The newest groups do not come to serve until the deadline is over; the others serve."""
    first = world.groups
    await world.look()
    await world.look()
    world.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
    for name in first & world.groups - world.deleted():
        pod = world.kube.of(PODS)[f"{name}-0"]
        world.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    world.now = LONG_AFTER
    await world.look()


async def test_a_late_revision_is_given_up_for_the_last_whole_one() -> None:
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


async def test_another_spec_is_tried_and_the_note_goes() -> None:
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


async def test_a_service_that_was_rolled_back_goes_on_with_the_same_revision_when_it_is_asked_to_pause_instead() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(rollout=ROLLOUT | {"onFailure": "Pause"})
    await world.settle(20)
    assert revisions(world) == {of(world): 2} and world.status.rollback is None


async def test_groups_that_are_added_while_it_is_rolled_back_are_of_the_former_revision() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT)
    good = of(world)
    await world.change(engine=BAD)
    await run_late(world)
    await world.settle()
    await world.change(replicas=4)
    await world.settle()
    assert revisions(world) == {good: 4}


@pytest.mark.parametrize("loss", ["record", "stranger", "nonsense"])
async def test_without_a_record_it_pauses_and_says_why(loss: str) -> None:
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
    ],
    ids=["least", "names", "overlay", "engine", "model", "placement"],
)
def test_what_is_recorded_gives_the_same_revision(spec: dict[str, Any]) -> None:
    then = make_service(**spec)
    record = former.record(then, revision(then))
    changed = make_service(replicas=7, servedNames=["other"], engine={"maxModelLen": 9})
    now = former.recalled(changed, record, revision(then))
    assert now and revision(now) == revision(then) and now.served_names == then.served_names
    assert now.spec.replicas == 7, "what makes no revision is as it is now"
    written = json.loads(record["data"]["spec"]) | {"later": True}
    later = former.recalled(changed, record | {"data": record["data"] | {"spec": json.dumps(written)}}, revision(then))
    assert later == now, "a later version of the operator may have written it"
    assert former.recalled(changed, record, "another") is None


async def test_a_revision_that_is_given_up_gets_no_share_of_requests() -> None:
    world = await settled(replicas=2, rollout=ROLLOUT | {"canaryWeight": 10})
    await world.change(engine=BAD)
    await world.look()
    assert (world.routers.policy.canary, world.routers.policy.canary_percent) == (of(world), 10)
    text = world.kube.of(CONFIG_MAPS)["chat-policy"]["data"]["policy.json"]
    assert msgspec.json.decode(text)["canary"] == of(world), "routers that never heard the operator know it too"
    await run_late(world)
    assert world.routers.policy.canary == ""
