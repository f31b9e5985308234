"""Groups that die again and again, or never come to serve: the budget, the pauses, and pods that are deleted once an incident."""

import datetime
from dataclasses import replace
from typing import Any

import pytest

from phalanx_api import labels
from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.status import RecoveryStatus
from phalanx_api.summary import BalancePolicy, GroupSummary
from phalanx_operator.decide.groups import recovery
from phalanx_operator.decide.state.fleet import Fleet, GroupLoadView
from phalanx_operator.decide.state.snapshot import ObservedGroup, Restarts
from phalanx_operator.kube.client import PODS, STATEFUL_SETS, Json, Rejected, Resource, Retry
from tests.control.builders import make_group
from tests.control.fake_kube import FakeKube
from tests.control.summaries import group as group_summary
from tests.control.summaries import summary
from tests.control.worlds import World

NOW = "2026-01-02T03:04:05Z"
EARLIER = "2026-01-02T02:34:05Z"
LONG_AGO = "2026-01-01T00:00:00Z"
POLICY = RestartPolicy()


def pods_with(group: ObservedGroup, **fields: Any) -> ObservedGroup:
    return replace(group, pods=tuple(replace(pod, uid=f"uid-{pod.name}", **fields) for pod in group.pods))


def dead(deaths: int, name: str = "a", death: str = "pod 0: rank 0 ended", excused: int = 0) -> Fleet:
    seen = GroupLoadView(
        name=name,
        fresh=True,
        streams=0,
        running=0,
        waiting=0,
        pressure=0.0,
        backlog_s=0.0,
        itl_s=0.0,
        speed=1.0,
        capacity=1,
        model=None,
        deaths=deaths,
        death=death,
        excused=excused,
    )
    return Fleet(asked=1, answered=1, groups={name: seen})


def loading(since: str = NOW, **fields: Any) -> ObservedGroup:
    return pods_with(make_group("a", ready=False, created=LONG_AGO), created=LONG_AGO, unready_since=since, **fields)


def test_reported_leader_failure_is_recorded_once() -> None:
    found = recovery.counted(loading(), dead(2), POLICY, NOW)
    assert (found.note.at, found.note.deaths, found.recent) == ((NOW, NOW), 2, 2)
    again = recovery.counted(replace(loading(), restarts=found.note), dead(2), POLICY, NOW)
    assert again.note == found.note


def test_silent_router_that_returns_adds_no_failure() -> None:
    note = recovery.counted(loading(), dead(2), POLICY, NOW).note
    silent = recovery.counted(replace(loading(), restarts=note), Fleet(), POLICY, NOW).note
    assert silent == note
    assert recovery.counted(replace(loading(), restarts=silent), dead(2), POLICY, NOW).note == note
    assert recovery.counted(replace(loading(), restarts=silent), dead(0), POLICY, NOW).note == note


def test_restarted_leader_counts_from_zero() -> None:
    note = recovery.counted(loading(), dead(2), POLICY, EARLIER).note
    other = replace(loading(restarts=1, ended="Error"), restarts=note)
    assert recovery.counted(other, dead(1), POLICY, NOW).note.at == (EARLIER, EARLIER, NOW, NOW, NOW)


def test_stale_failure_reports_add_no_failure() -> None:
    """The leader's container ended once; routers tell its number until their links to the next one are open."""
    note = recovery.counted(loading(), dead(4), POLICY, EARLIER).note
    first, other = loading().pods
    pods = (replace(first, restarts=1, ended="Error"), other)
    anew = replace(loading(), pods=pods)
    stale = recovery.counted(replace(anew, restarts=note), dead(4), POLICY, NOW)
    assert stale.note.at == (*note.at, NOW), "the container's end alone is new"
    silent = recovery.counted(replace(anew, restarts=stale.note), Fleet(), POLICY, NOW)
    again = recovery.counted(replace(anew, restarts=silent.note), dead(4), POLICY, NOW)
    assert again.note == stale.note
    told = recovery.counted(replace(anew, restarts=again.note), dead(0), POLICY, NOW)
    assert (told.recent, told.note.deaths) == (5, 0)
    died = recovery.counted(replace(anew, restarts=told.note), dead(1), POLICY, NOW)
    assert (died.recent, died.note.deaths) == (6, 1)


def test_failures_blamed_on_a_request_are_subtracted_once() -> None:
    note = recovery.counted(loading(), dead(3), POLICY, EARLIER).note
    group = replace(loading(), restarts=note)
    freed = recovery.counted(group, dead(3, excused=2), POLICY, NOW)
    assert (freed.recent, freed.note.at, freed.note.deaths, freed.note.excused) == (1, (EARLIER,), 3, 2)
    after = replace(loading(), restarts=freed.note)
    for fleet in (dead(3, excused=2), dead(3), Fleet(), dead(3, excused=1)):
        assert recovery.counted(after, fleet, POLICY, NOW).note == freed.note, "a router that starts anew excuses nothing twice"
    assert recovery.counted(after, dead(4, excused=2), POLICY, NOW).note.at == (EARLIER, NOW)
    at_once = recovery.counted(loading(), dead(1, excused=1), POLICY, NOW)
    assert (at_once.recent, at_once.note.deaths) == (0, 1)


def test_excuses_of_a_former_leader_do_not_count() -> None:
    note = recovery.counted(loading(), dead(2, excused=2), POLICY, EARLIER).note
    first, other = loading().pods
    successor = replace(loading(), pods=(replace(first, uid="another"), other), restarts=note)
    fresh = recovery.counted(successor, dead(0), POLICY, NOW)
    died = recovery.counted(replace(successor, restarts=fresh.note), dead(1), POLICY, NOW)
    assert (fresh.recent, died.recent, died.note.excused) == (0, 1, 0)
    assert recovery.counted(replace(successor, restarts=died.note), dead(1, excused=1), POLICY, NOW).recent == 0


@pytest.mark.parametrize(("ended", "count"), [("Error", 2), ("OOMKilled", 2), ("Completed", 0), ("ContainerStatusUnknown", 0)])
def test_restarts_of_containers_count_unless_the_cause_lies_outside(ended: str, count: int) -> None:
    found = recovery.counted(loading(restarts=1, ended=ended), Fleet(), POLICY, NOW)
    assert (found.recent, found.note.containers) == (count, 2)


def test_a_group_that_never_died_is_never_noted_on() -> None:
    assert recovery.counted(loading(), Fleet(), POLICY, NOW).note == Restarts()
    assert recovery.counted(loading(), dead(0), POLICY, NOW).note == Restarts()


def test_failures_older_than_the_window_do_not_count() -> None:
    group = replace(loading(), restarts=Restarts(at=(LONG_AGO, EARLIER), engine="uid-a-0/0", deaths=2))
    assert recovery.counted(group, dead(2), POLICY, NOW).recent == 1


async def test_group_hanging_at_each_start_moves_to_other_nodes() -> None:
    """With the defaults six starts take three hours, which is longer than the window."""
    world = await overdue_world()
    group, start = next(iter(world.groups)), datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    for times in range(POLICY.max_group_restarts + 1):
        world.now = (start + datetime.timedelta(seconds=times * 1860)).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert f"hurry pods {group}-0" in await world.look()
        unready(world, world.now, uid=f"start-{times}")
    await world.look()
    assert world.deleted() == {group}
    (successor,) = world.groups - {group}
    assert "node-0" in str(world.kube.of(STATEFUL_SETS)[successor]["spec"]["template"]["spec"]["affinity"])
    assert world.status.recovery and "restarted 6 times within 11400 s" in world.status.recovery.message


def test_restart_of_a_served_group_counts_in_the_window() -> None:
    group = replace(loading(), restarts=Restarts(at=(LONG_AGO, EARLIER)))
    assert recovery.counted(group, Fleet(), POLICY, NOW).recent == 1
    in_vain = replace(group, restarts=Restarts(at=("2026-01-02T01:04:05Z", EARLIER), since="2026-01-02T00:30:00Z"))
    assert recovery.counted(in_vain, Fleet(), POLICY, NOW).recent == 2


@pytest.mark.parametrize(
    ("deaths", "mode", "spent"), [(5, "RecreateGroup", False), (6, "RecreateGroup", True), (6, "None", False)]
)
def test_a_group_that_died_too_often_is_given_up(deaths: int, mode: Any, spent: bool) -> None:
    policy = RestartPolicy(mode=mode)
    group = recovery.assess([loading()], dead(deaths), policy, NOW)[0]
    assert (group.spent, bool(group.lost)) == (spent, spent)
    assert not spent or group.lost == "it was restarted 6 times within 3600 s: pod 0: rank 0 ended"


def test_one_that_serves_is_kept_whatever_it_went_through() -> None:
    assert not recovery.assess([make_group("a")], dead(9), POLICY, NOW)[0].lost


@pytest.mark.parametrize(
    ("group", "due"),
    [
        (loading(since=LONG_AGO), True),
        (loading(since=EARLIER), True),
        (loading(since=NOW), False),
        (loading(since=LONG_AGO, node=""), False),
        (loading(since=LONG_AGO, reason="ImagePullBackOff"), False),
        (loading(since=LONG_AGO, leaving=True), False),
        (make_group("a"), False),
        (replace(loading(since=LONG_AGO), pods=loading(since=LONG_AGO).pods[:1]), False),
    ],
    ids=["long", "just", "young", "no node", "no image", "being replaced", "ready", "a pod is missing"],
)
def test_when_all_pods_of_a_group_are_replaced(group: ObservedGroup, due: bool) -> None:
    assert recovery.overdue(group, POLICY, NOW) is due


def gone(times: int, at: str = NOW) -> RecoveryStatus:
    return RecoveryStatus(revision="new", given_up=times, last_time=at, nodes=("node-9",))


@pytest.mark.parametrize(("times", "pause_s"), [(0, 0), (1, 0), (2, 60), (3, 120), (4, 240), (40, 3600)])
def test_first_successor_is_immediate_later_ones_back_off(times: int, pause_s: float) -> None:
    assert recovery.pause_s(gone(times) if times else None, POLICY, NOW) == pause_s


def test_history_of_given_up_groups_is_kept() -> None:
    spent = replace(loading(), spent=True, lost="often")
    first = recovery.followed(None, [spent], "new", POLICY, NOW)
    assert first and (first.given_up, first.nodes, first.message) == (1, ("node-0", "node-1"), "a: often")
    second = recovery.followed(gone(1), [spent], "new", POLICY, NOW)
    assert second and (second.given_up, second.nodes) == (2, ("node-0", "node-1", "node-9"))
    assert recovery.followed(gone(2), [make_group("b")], "newer", POLICY, NOW) is None, "another revision begins anew"
    assert recovery.followed(gone(2), [loading()], "new", POLICY, NOW) == gone(2)
    assert recovery.followed(gone(2, EARLIER), [make_group("b")], "new", POLICY, NOW) == gone(2, EARLIER), "not a window yet"
    assert recovery.followed(gone(2, LONG_AGO), [make_group("b")], "new", POLICY, NOW) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"at": 1}', '{"deaths": "x"}'])
def test_unreadable_note_is_ignored(text: str | None) -> None:
    assert recovery.read(text) == Restarts()


def test_a_note_comes_back_as_it_was_written() -> None:
    note = Restarts(at=(NOW,), pods=("uid-1", "uid-2"), engine="uid-1/0", deaths=3, containers=1, since=EARLIER, excused=2)
    assert recovery.read(recovery.written(note)) == note


def unready(world: World, since: str, uid: str = "") -> None:
    """Every pod has been not ready since then; with `uid` they are new ones."""
    for name, pod in list(world.kube.of(PODS).items()):
        if pod["metadata"]["labels"][labels.COMPONENT] != "group":
            continue
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": since}
        kept = {field: value for field, value in pod["metadata"].items() if not field.startswith("deletion")}
        metadata = kept | {"uid": f"{uid}-{name}"} if uid else pod["metadata"]
        world.kube.put(PODS, {**pod, "metadata": metadata, "status": {"conditions": [condition]}})


async def overdue_world(kube: FakeKube | None = None) -> World:
    world = World(kube, parallelism={"tensor": 2, "gpusPerPod": 1}, placement={"gang": {"mode": "None"}})
    await world.settle()
    unready(world, LONG_AGO)
    return world


async def test_pods_of_a_hanging_group_are_replaced_once() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    writes = await world.look()
    at = [
        writes.index(f"merge statefulsets {group}"),
        writes.index(f"hurry pods {group}-0"),
        writes.index(f"hurry pods {group}-1"),
    ]
    assert at == sorted(at), "the note comes before the first pod goes"
    assert ("Normal", "GroupRestarted") in world.notes()
    assert world.status.groups[0].restarts == 0, "it is counted from the next look on"
    assert not any("pods" in call for call in await world.look()), "nothing is deleted twice"
    assert world.status.groups[0].restarts == 1
    unready(world, world.now, uid="second")
    assert not any("pods" in call for call in await world.look()), "the new ones have their own time"
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded"), "the group has had its own"
    world.cluster.start_pods()
    await world.settle()
    assert world.ready == ("True", "Ready")
    note = recovery.read(world.kube.of(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS])
    assert (note.since, note.pods, len(note.at)) == ("", (), 1), "what was tried is over, and counts for its window"


async def test_new_operator_finishes_a_noted_restart() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    world.kube.failures[f"hurry pods {group}-1"] = Retry("the operator ends here")
    with pytest.raises(Retry):
        await world.look()
    note = world.kube.of(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS]
    other = World(world.kube)
    writes = await other.look()
    assert [call for call in writes if "pods" in call] == [f"hurry pods {group}-1"]
    assert other.kube.of(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS] == note, "the same incident"
    unready(other, LONG_AGO, uid="second")
    assert [call for call in await other.look() if call.startswith("hurry")] == [f"hurry pods {group}-{i}" for i in range(2)]


async def test_noted_restart_is_dropped_for_a_serving_group() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    world.kube.failures[f"hurry pods {group}-0"] = Retry("the operator ends here")
    with pytest.raises(Retry):
        await world.look()
    world.cluster.start_pods()
    writes = await World(world.kube).look()
    assert not [call for call in writes if call.startswith("hurry")]
    note = recovery.read(world.kube.of(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS])
    assert note.pods == (), "and it is not ended later"


def test_noted_restart_is_dropped_for_an_unmanaged_group() -> None:
    group = replace(loading(), restarts=Restarts(pods=("uid-a-0",)))
    assert recovery.begun(group, POLICY) == ["a-0"]
    assert recovery.begun(group, RestartPolicy(mode="None")) == []


class Refusing(FakeKube):
    """No StatefulSet is taken any more once `full`."""

    full = False

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        if self.full and resource is STATEFUL_SETS:
            raise Rejected("exceeded quota: count/statefulsets.apps")
        return await super().create(resource, body, dry_run=dry_run)


async def test_refused_group_stops_neither_recovery_nor_scaling() -> None:
    kube = Refusing()
    world = World(kube, replicas=1, autoscaling={"maxReplicas": 2, "targets": {"ttftP95Ms": 2000}})
    world.cluster.start_router_pods()
    await world.settle()
    group = next(iter(world.groups))
    kube.full = True
    await world.change(replicas=3)
    unready(world, LONG_AGO)
    world.routers.asked, world.routers.policy = [], BalancePolicy()
    before = len(kube.calls)
    with pytest.raises(Rejected):
        await world.look()
    writes = kube.calls[before:]
    assert f"hurry pods {group}-0" in writes and "merge inferenceservices/scale chat" in writes
    assert world.ready == ("False", "QuotaExceeded") and world.routers.asked and world.routers.policy.number > 0
    assert {("Normal", "GroupRestarted"), ("Normal", "Scaled")} <= set(world.notes())
    before = len(kube.calls)
    with pytest.raises(Rejected):
        await world.look()
    assert not [call for call in kube.calls[before:] if call.startswith("hurry")], "nothing is done twice"


def dying(group: str, deaths: int) -> GroupSummary:
    return group_summary(group, deaths=deaths, death="pod 0: no such file config.json", state="dead")


async def test_group_failing_on_every_node_stalls_others_serve() -> None:
    world = World(replicas=2)
    world.cluster.start_router_pods()
    await world.settle()
    good, bad = sorted(world.groups)
    for round_, moment in enumerate(("2026-01-02T04:00:00Z", "2026-01-02T04:01:00Z")):
        world.now = moment
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": moment}
        world.kube.put(PODS, world.kube.of(PODS)[f"{bad}-0"] | {"status": {"conditions": [condition]}})
        world.routers.says = summary(group_summary(good), dying(bad, 6))
        await world.look()
        assert bad in world.deleted()
        for where in [w for w in world.kube.objects if w[2].startswith(bad)]:
            del world.kube.objects[where]
        successors = world.groups - {good}
        if round_ == 0:
            bad = next(iter(successors))
            nodes = world.kube.of(STATEFUL_SETS)[bad]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
            assert "node-0" in str(nodes), "the first successor keeps away from where it died"
            world.cluster.start_pods()
        else:
            assert not successors, "the next one waits"
    await world.look()
    assert world.condition("Stalled") == ("True", "RestartBudgetSpent")
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting"), "a group that is wanted is not made"
    assert world.ready == ("False", "RestartBudgetSpent")
    assert world.condition("Available")[0] == "True"
    assert world.status.recovery and "no such file config.json" in world.status.recovery.message
    world.now = "2026-01-02T04:02:01Z"
    await world.look()
    assert len(world.groups - {good}) == 1, "after the pause there is another try"
    assert world.condition("Stalled")[0] == "True", "until it serves"
    world.routers.says = summary(group_summary(good))
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert "Stalled" not in {condition.type for condition in world.status.conditions}
    assert world.status.recovery, "the next one that dies waits longer, for a while"
