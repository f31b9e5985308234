"""Groups that die repeatedly or never become ready: restart budget, pauses, and one pod deletion per incident."""

import datetime
from dataclasses import replace
from typing import Any

import pytest

from phalanx_api import labels
from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.status import RecoveryStatus, Status
from phalanx_api.summary import BalancePolicy, GroupSummary
from phalanx_operator.decide.groups import progress, recovery
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, RestartRecord, with_assessment
from phalanx_operator.kube.client import PODS, STATEFUL_SETS, Json, Rejected, Resource, Retry
from tests.control.builders import make_group, make_report, make_service, pod_body
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import LONG_AGO, make_unready, overdue_world
from tests.control.simulated_service import rate_for
from tests.control.summaries import group as group_summary
from tests.control.summaries import summary
from tests.control.worlds import World

NOW = "2026-01-02T03:04:05Z"
EARLIER = "2026-01-02T02:34:05Z"
POLICY = RestartPolicy()


def pods_with(group: ObservedGroup, **fields: Any) -> ObservedGroup:
    return replace(group, pods=tuple(replace(pod, uid=f"uid-{pod.name}", **fields) for pod in group.pods))


def fleet_with_deaths(deaths: int, name: str = "a", death: str = "pod 0: rank 0 ended", excused: int = 0) -> Fleet:
    report = make_report(name, is_fresh=True, deaths=deaths, last_death=death, excused=excused)
    return Fleet(polled=1, answered=1, groups={name: report})


def shift(time: str, seconds: float) -> str:
    return (datetime.datetime.fromisoformat(time) + datetime.timedelta(seconds=seconds)).isoformat()


def loading(since: str = NOW, **fields: Any) -> ObservedGroup:
    return pods_with(make_group("a", ready=False, created=LONG_AGO), created=LONG_AGO, unready_since=since, **fields)


def test_reported_leader_failure_is_recorded_once() -> None:
    count = recovery.count_restarts(loading(), fleet_with_deaths(2), POLICY, NOW)
    assert (count.record.at, count.record.deaths, count.recent) == ((NOW, NOW), 2, 2)
    again = recovery.count_restarts(replace(loading(), restarts=count.record), fleet_with_deaths(2), POLICY, NOW)
    assert again.record == count.record


def test_silent_router_that_returns_adds_no_failure() -> None:
    record = recovery.count_restarts(loading(), fleet_with_deaths(2), POLICY, NOW).record
    silent = recovery.count_restarts(replace(loading(), restarts=record), Fleet(), POLICY, NOW).record
    assert silent == record
    assert recovery.count_restarts(replace(loading(), restarts=silent), fleet_with_deaths(2), POLICY, NOW).record == record
    assert recovery.count_restarts(replace(loading(), restarts=silent), fleet_with_deaths(0), POLICY, NOW).record == record


def test_restarted_leader_counts_from_zero() -> None:
    record = recovery.count_restarts(loading(), fleet_with_deaths(2), POLICY, EARLIER).record
    other = replace(loading(restarts=1, last_termination="Error"), restarts=record)
    assert recovery.count_restarts(other, fleet_with_deaths(1), POLICY, NOW).record.at == (EARLIER, EARLIER, NOW, NOW, NOW)


def test_stale_failure_reports_add_no_failure() -> None:
    """Routers report the former leader's count until they connect to the restarted one."""
    record = recovery.count_restarts(loading(), fleet_with_deaths(4), POLICY, EARLIER).record
    first, other = loading().pods
    pods = (replace(first, restarts=1, last_termination="Error"), other)
    restarted = replace(loading(), pods=pods)
    stale = recovery.count_restarts(replace(restarted, restarts=record), fleet_with_deaths(4), POLICY, NOW)
    assert stale.record.at == (*record.at, NOW), "only the container restart is new"
    silent = recovery.count_restarts(replace(restarted, restarts=stale.record), Fleet(), POLICY, NOW)
    again = recovery.count_restarts(replace(restarted, restarts=silent.record), fleet_with_deaths(4), POLICY, NOW)
    assert again.record == stale.record
    connected = recovery.count_restarts(replace(restarted, restarts=again.record), fleet_with_deaths(0), POLICY, NOW)
    assert (connected.recent, connected.record.deaths) == (5, 0)
    died = recovery.count_restarts(replace(restarted, restarts=connected.record), fleet_with_deaths(1), POLICY, NOW)
    assert (died.recent, died.record.deaths) == (6, 1)


def test_failures_blamed_on_a_request_are_subtracted_once() -> None:
    record = recovery.count_restarts(loading(), fleet_with_deaths(3), POLICY, EARLIER).record
    group = replace(loading(), restarts=record)
    excused = recovery.count_restarts(group, fleet_with_deaths(3, excused=2), POLICY, NOW)
    assert (excused.recent, excused.record.at, excused.record.deaths, excused.record.excused) == (1, (EARLIER,), 3, 2)
    after = replace(loading(), restarts=excused.record)
    for fleet in (fleet_with_deaths(3, excused=2), fleet_with_deaths(3), Fleet(), fleet_with_deaths(3, excused=1)):
        assert recovery.count_restarts(after, fleet, POLICY, NOW).record == excused.record, (
            "a restarted router excuses no death twice"
        )
    assert recovery.count_restarts(after, fleet_with_deaths(4, excused=2), POLICY, NOW).record.at == (EARLIER, NOW)
    at_once = recovery.count_restarts(loading(), fleet_with_deaths(1, excused=1), POLICY, NOW)
    assert (at_once.recent, at_once.record.deaths) == (0, 1)


def test_excuses_of_a_former_leader_do_not_count() -> None:
    record = recovery.count_restarts(loading(), fleet_with_deaths(2, excused=2), POLICY, EARLIER).record
    first, other = loading().pods
    successor = replace(loading(), pods=(replace(first, uid="another"), other), restarts=record)
    fresh = recovery.count_restarts(successor, fleet_with_deaths(0), POLICY, NOW)
    died = recovery.count_restarts(replace(successor, restarts=fresh.record), fleet_with_deaths(1), POLICY, NOW)
    assert (fresh.recent, died.recent, died.record.excused) == (0, 1, 0)
    assert (
        recovery.count_restarts(replace(successor, restarts=died.record), fleet_with_deaths(1, excused=1), POLICY, NOW).recent
        == 0
    )


@pytest.mark.parametrize(
    ("termination", "restarts"), [("Error", 2), ("OOMKilled", 2), ("Completed", 0), ("ContainerStatusUnknown", 0)]
)
def test_container_restarts_count_unless_the_cause_is_external(termination: str, restarts: int) -> None:
    count = recovery.count_restarts(loading(restarts=1, last_termination=termination), Fleet(), POLICY, NOW)
    assert (count.recent, count.record.containers) == (restarts, 2)


def test_group_without_deaths_has_no_record() -> None:
    assert recovery.count_restarts(loading(), Fleet(), POLICY, NOW).record == RestartRecord()
    assert recovery.count_restarts(loading(), fleet_with_deaths(0), POLICY, NOW).record == RestartRecord()


def test_failures_older_than_the_window_do_not_count() -> None:
    group = replace(loading(), restarts=RestartRecord(at=(LONG_AGO, EARLIER), engine="uid-a-0/0", deaths=2))
    assert recovery.count_restarts(group, fleet_with_deaths(2), POLICY, NOW).recent == 1


async def test_group_hanging_at_each_start_moves_to_other_nodes() -> None:
    """By default six starts take three hours, longer than the window."""
    world = await overdue_world()
    group, start = next(iter(world.groups)), datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    for attempt in range(POLICY.max_group_restarts + 1):
        world.now = (start + datetime.timedelta(seconds=attempt * 1860)).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert f"quick-delete pods {group}-0" in await world.reconcile()
        make_unready(world, world.now, uid=f"start-{attempt}")
    await world.reconcile()
    assert world.deleted() == {group}
    (successor,) = world.groups - {group}
    assert "node-0" in str(world.kube.of_kind(STATEFUL_SETS)[successor]["spec"]["template"]["spec"]["affinity"])
    assert world.status.recovery and "restarted 6 times within 11400 s" in world.status.recovery.message


def test_restart_of_a_served_group_counts_in_the_window() -> None:
    group = replace(loading(), restarts=RestartRecord(at=(LONG_AGO, EARLIER)))
    assert recovery.count_restarts(group, Fleet(), POLICY, NOW).recent == 1
    unready = replace(group, restarts=RestartRecord(at=("2026-01-02T01:04:05Z", EARLIER), since="2026-01-02T00:30:00Z"))
    assert recovery.count_restarts(unready, Fleet(), POLICY, NOW).recent == 2


@pytest.mark.parametrize(
    ("deaths", "mode", "lost"), [(5, "RecreateGroup", False), (6, "RecreateGroup", True), (6, "None", False)]
)
def test_group_over_its_restart_budget_is_lost(deaths: int, mode: Any, lost: bool) -> None:
    policy = RestartPolicy(mode=mode)
    assessment = recovery.assess([loading()], fleet_with_deaths(deaths), policy, NOW)[0].assessment
    assert (assessment.exceeds_restart_budget, bool(assessment.lost_reason)) == (lost, lost)
    assert not lost or assessment.lost_reason == "it was restarted 6 times within 3600 s: pod 0: rank 0 ended"


def test_ready_group_is_kept_after_any_number_of_deaths() -> None:
    assert not recovery.assess([make_group("a")], fleet_with_deaths(9), POLICY, NOW)[0].assessment.lost_reason


@pytest.mark.parametrize(
    ("group", "due"),
    [
        (loading(since=LONG_AGO), True),
        (loading(since=EARLIER), True),
        (loading(since=NOW), False),
        (loading(since=LONG_AGO, node=""), False),
        (loading(since=LONG_AGO, reason="ImagePullBackOff"), False),
        (loading(since=LONG_AGO, terminating=True), False),
        (make_group("a"), False),
        (replace(loading(since=LONG_AGO), pods=loading(since=LONG_AGO).pods[:1]), False),
    ],
    ids=["long ago", "just over", "recent", "no node", "no image", "terminating", "ready", "a pod is missing"],
)
def test_when_all_pods_of_a_group_are_replaced(group: ObservedGroup, due: bool) -> None:
    assert recovery.is_overdue(group, POLICY, NOW) is due


def test_group_starts_when_its_last_pod_is_created() -> None:
    """A worker was evicted and drained for an hour, in which its leader was unready."""
    leader, worker = loading(since="2026-01-02T02:04:05Z").pods
    spec = make_service(rollout={"progressDeadlineSeconds": 1800}, drain={"timeoutSeconds": 3600}).spec
    draining = replace(loading(), pods=(leader, replace(worker, unready_since=LONG_AGO, terminating=True)))
    assert progress.deadline_failure([draining], draining.revision, spec, NOW) == ""
    for created, is_late in ((NOW, False), (LONG_AGO, True)):
        again = replace(draining, pods=(draining.pods[0], replace(worker, created=created, unready_since=created)))
        assert recovery.is_overdue(again, POLICY, NOW) is is_late
        assert bool(progress.deadline_failure([again], again.revision, spec, NOW)) is is_late
        assert recovery.record_restart(again, POLICY, NOW).since == created


def test_workers_that_are_evicted_again_excuse_one_drain() -> None:
    """A worker is evicted each 800 s: 1800 s and one drain of 315 s after its start the group is late, whatever comes later."""
    spec = make_service(rollout={"progressDeadlineSeconds": 1800}, drain={"timeoutSeconds": 300}).spec
    leader, worker = loading(since=LONG_AGO).pods
    for after_s, is_late in ((799, False), (1599, False), (2114, False), (2115, True), (2399, True), (3100, True)):
        created, now = (shift(LONG_AGO, seconds) for seconds in (after_s // 800 * 800, after_s))
        for terminating in (False, True):
            young = replace(worker, created=created, unready_since=created, terminating=terminating)
            group = replace(loading(), pods=(leader, young))
            assert bool(progress.deadline_failure([group], group.revision, spec, now)) is is_late
            due_s = progress.due_in_s([group], Status(), group.revision, spec, now)
            assert is_late or (due_s is not None and due_s > 0)


def test_restarts_by_the_operator_excuse_no_time() -> None:
    """The pods of a late group are being deleted, and no group is given up for its revision meanwhile."""
    spec = make_service(rollout={"progressDeadlineSeconds": 1800}).spec
    group = replace(loading(terminating=True), restarts=RestartRecord(at=(NOW,), since=LONG_AGO))
    assert progress.deadline_failure([group], group.revision, spec, NOW)


def status(given_up: int, at: str = NOW) -> RecoveryStatus:
    return RecoveryStatus(revision="new", given_up=given_up, last_time=at, nodes=("node-9",))


@pytest.mark.parametrize(("given_up", "pause_s"), [(0, 0), (1, 0), (2, 60), (3, 120), (4, 240), (40, 3600)])
def test_first_successor_is_immediate_later_ones_back_off(given_up: int, pause_s: float) -> None:
    assert recovery.pause_s(status(given_up) if given_up else None, POLICY, NOW) == pause_s


def test_pause_is_bounded_after_a_step_back() -> None:
    assert recovery.pause_s(status(2, "2026-01-02T04:04:05Z"), POLICY, NOW) == 60.0


def test_history_of_lost_groups_is_kept() -> None:
    spent = with_assessment(loading(), exceeds_restart_budget=True, lost_reason="often")
    first = recovery.recovery_status(None, [spent], "new", POLICY, NOW)
    assert first and (first.given_up, first.nodes, first.message) == (1, ("node-0", "node-1"), "a: often")
    second = recovery.recovery_status(status(1), [spent], "new", POLICY, NOW)
    assert second and (second.given_up, second.nodes) == (2, ("node-0", "node-1", "node-9"))
    assert recovery.recovery_status(status(2), [make_group("b")], "newer", POLICY, NOW) is None, "another revision resets it"
    assert recovery.recovery_status(status(2), [loading()], "new", POLICY, NOW) == status(2)
    assert recovery.recovery_status(status(2, EARLIER), [make_group("b")], "new", POLICY, NOW) == status(2, EARLIER), (
        "less than a window"
    )
    assert recovery.recovery_status(status(2, LONG_AGO), [make_group("b")], "new", POLICY, NOW) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"at": 1}', '{"deaths": "x"}'])
def test_unreadable_note_is_ignored(text: str | None) -> None:
    assert recovery.parse_record(text) == RestartRecord()


def test_a_note_comes_back_as_it_was_written() -> None:
    record = RestartRecord(at=(NOW,), pods=("uid-1", "uid-2"), engine="uid-1/0", deaths=3, containers=1, since=EARLIER, excused=2)
    assert recovery.parse_record(recovery.format_record(record)) == record


async def test_pods_of_a_hanging_group_are_replaced_once() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    writes = await world.reconcile()
    at = [
        writes.index(f"merge statefulsets {group}"),
        writes.index(f"quick-delete pods {group}-0"),
        writes.index(f"quick-delete pods {group}-1"),
    ]
    assert at == sorted(at), "the record is stored before the first deletion"
    assert ("Normal", "GroupRestarted") in world.events()
    assert world.status.groups[0].restarts == 0, "it counts from the next reconcile on"
    assert not any("pods" in call for call in await world.reconcile()), "no pod is deleted twice"
    assert world.status.groups[0].restarts == 1
    make_unready(world, world.now, uid="second")
    assert not any("pods" in call for call in await world.reconcile()), "the new pods have their own startup time"
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded"), "the group missed its deadline"
    world.cluster.start_pods()
    await world.settle()
    assert world.ready == ("True", "Ready")
    record = recovery.parse_record(world.kube.of_kind(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS])
    assert (record.since, record.pods, len(record.at)) == ("", (), 1), "the incident is over; its restart counts in the window"


async def test_new_operator_finishes_a_recorded_restart() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    world.kube.failures[f"quick-delete pods {group}-1"] = Retry("the operator exits here")
    with pytest.raises(Retry):
        await world.reconcile()
    record = world.kube.of_kind(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS]
    other = World(world.kube)
    writes = await other.reconcile()
    assert [call for call in writes if "pods" in call] == [f"quick-delete pods {group}-1"]
    assert other.kube.of_kind(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS] == record, "the same incident"
    make_unready(other, LONG_AGO, uid="second")
    assert [call for call in await other.reconcile() if call.startswith("quick-delete")] == [
        f"quick-delete pods {group}-{i}" for i in range(2)
    ]


async def test_recorded_restart_is_dropped_for_a_serving_group() -> None:
    world = await overdue_world()
    group = next(iter(world.groups))
    world.kube.failures[f"quick-delete pods {group}-0"] = Retry("the operator exits here")
    with pytest.raises(Retry):
        await world.reconcile()
    world.cluster.start_pods()
    writes = await World(world.kube).reconcile()
    assert not [call for call in writes if call.startswith("quick-delete")]
    record = recovery.parse_record(world.kube.of_kind(STATEFUL_SETS)[group]["metadata"]["annotations"][labels.RESTARTS])
    assert record.pods == (), "it is not continued later"


def test_recorded_restart_is_dropped_for_an_unmanaged_group() -> None:
    group = replace(loading(), restarts=RestartRecord(pods=("uid-a-0",)))
    assert recovery.unfinished_restart(group, POLICY) == ["a-0"]
    assert recovery.unfinished_restart(group, RestartPolicy(mode="None")) == []


class FullKube(FakeKube):
    """Rejects StatefulSets once `is_full`."""

    is_full = False
    why = "exceeded quota: count/statefulsets.apps"

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        if self.is_full and resource is STATEFUL_SETS:
            raise Rejected(self.why)
        return await super().create(resource, body, dry_run=dry_run)


async def test_rejected_group_stops_neither_recovery_nor_scaling() -> None:
    kube = FullKube()
    world = World(kube, replicas=1, autoscaling={"maxReplicas": 2, "targets": {"ttftP95Ms": 2000}})
    world.cluster.start_router_pods()
    await world.settle()
    group = next(iter(world.groups))
    kube.is_full = True
    await world.change(replicas=3)
    make_unready(world, LONG_AGO)
    world.routers.targets, world.routers.policy = [], BalancePolicy()
    before = len(kube.calls)
    with pytest.raises(Rejected):
        await world.reconcile()
    writes = kube.calls[before:]
    assert f"quick-delete pods {group}-0" in writes and "merge inferenceservices/scale chat" in writes
    assert world.ready == ("False", "QuotaExceeded") and world.routers.targets and world.routers.policy.number > 0
    assert {("Normal", "GroupRestarted"), ("Normal", "Scaled")} <= set(world.events())
    before = len(kube.calls)
    with pytest.raises(Rejected):
        await world.reconcile()
    assert not [call for call in kube.calls[before:] if call.startswith("quick-delete")], "no action is repeated"


async def test_rejected_successor_counts_no_loss() -> None:
    """The group over its restart budget is not deleted before its successor is accepted."""
    kube = FullKube()
    world = await overdue_world(kube)
    (name,) = world.groups
    body = world.kube.of_kind(STATEFUL_SETS)[name]
    record = recovery.format_record(RestartRecord(at=(world.now,) * (POLICY.max_group_restarts + 1)))
    world.kube.put(STATEFUL_SETS, body | {"metadata": body["metadata"] | {"annotations": {labels.RESTARTS: record}}})
    kube.is_full, kube.why = True, "admission webhook denied the request"
    for _ in range(3):
        with pytest.raises(Rejected):
            await world.reconcile()
    assert world.deleted() == set() and world.status.recovery is None
    kube.is_full = False
    await world.reconcile()
    assert world.deleted() == {name} and world.status.recovery is not None and world.status.recovery.given_up == 1


async def test_rejected_group_does_not_reset_the_autoscaler() -> None:
    kube = FullKube()
    targets, scale_down = {"ttftP95Ms": 2000, "itlP95Ms": 100}, {"stabilizationSeconds": 60}
    world = World(kube, replicas=2, autoscaling={"maxReplicas": 9, "targets": targets, "scaleDown": scale_down})
    world.cluster.start_router_pods()
    await world.settle()
    kube.is_full = True
    await world.change(replicas=3)
    world.routers.summary = summary(*map(group_summary, sorted(world.groups)), rate=rate_for(0.2))
    replicas = []
    for clock in (100.0, 120.0, 140.0, 160.0):
        world.clock = clock
        with pytest.raises(Rejected):
            await world.reconcile()
        replicas.append(world.service["spec"]["replicas"])
    assert replicas == [3, 3, 3, 2], "the stabilization time passes although each reconcile fails"


def dying_group(group: str, deaths: int) -> GroupSummary:
    return group_summary(group, deaths=deaths, death="pod 0: no such file config.json", state="dead")


async def test_group_failing_on_every_node_stalls_others_serve() -> None:
    world = World(replicas=2)
    world.cluster.start_router_pods()
    await world.settle()
    good, bad = sorted(world.groups)
    for attempt, moment in enumerate(("2026-01-02T04:00:00Z", "2026-01-02T04:01:00Z")):
        world.now = moment
        condition = {"type": "Ready", "status": "False", "lastTransitionTime": moment}
        world.kube.put(PODS, world.kube.of_kind(PODS)[f"{bad}-0"] | {"status": {"conditions": [condition]}})
        world.routers.summary = summary(group_summary(good), dying_group(bad, 6))
        await world.reconcile()
        assert bad in world.deleted()
        for where in [w for w in world.kube.objects if w[2].startswith(bad)]:
            del world.kube.objects[where]
        successors = world.groups - {good}
        if attempt == 0:
            bad = next(iter(successors))
            nodes = world.kube.of_kind(STATEFUL_SETS)[bad]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
            assert "node-0" in str(nodes), "the first successor avoids the node"
            world.cluster.start_pods()
        else:
            assert not successors, "the next successor waits"
    await world.reconcile()
    assert world.condition("Stalled") == ("True", "RestartBudgetSpent")
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting"), "a wanted group is missing"
    assert world.ready == ("False", "RestartBudgetSpent")
    assert world.condition("Available")[0] == "True"
    assert world.status.recovery and "no such file config.json" in world.status.recovery.message
    world.now = "2026-01-02T04:02:01Z"
    await world.reconcile()
    assert len(world.groups - {good}) == 1, "the next successor follows after the pause"
    assert world.condition("Stalled")[0] == "True", "until the group is ready"
    world.routers.summary = summary(group_summary(good))
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert "Stalled" not in {condition.type for condition in world.status.conditions}
    assert world.status.recovery, "the next pause would be longer"


def replace_failed_pod(world: World, group: str, reason: str, seconds: float) -> None:
    """A kubelet fails the pod so long after NOW, and its controller creates another before the operator looks."""
    world.now = shift(NOW, seconds).replace("+00:00", "Z")
    body = pod_body(world.kube.of_kind(STATEFUL_SETS)[group], 0, ready=False, uid=f"pod-{world.now}")
    body["metadata"] |= {"creationTimestamp": world.now}
    failed = {"phase": "Failed", "reason": reason, "message": "no healthy devices"}
    world.kube.put(PODS, body | {"metadata": body["metadata"] | {"uid": f"failed-{world.now}"}, "status": failed})
    world.cluster.sync_informers()
    world.kube.put(PODS, body)


@pytest.mark.parametrize(("reason", "pause_s"), [("UnexpectedAdmissionError", 45), ("Evicted", 1500)])
async def test_group_that_a_kubelet_refuses_starts_elsewhere(reason: str, pause_s: int) -> None:
    """Pods that are as young as the last refusal never exceed `startupSeconds`, nor do pauses between them end the count."""
    world = World(restartPolicy={"maxGroupRestarts": 2, "startupSeconds": 1800, "windowSeconds": 60})
    await world.reconcile()
    (group,) = world.groups
    await world.reconcile()
    for seconds in (pause_s, pause_s + 10, 2 * pause_s, 2 * pause_s + 10):
        replace_failed_pod(world, group, reason, seconds)
        await world.reconcile()
        assert world.groups == {group}, "two within 30 s count once"
        assert f"{reason}: no healthy devices" in str(world.status.conditions)
    replace_failed_pod(world, group, reason, 3 * pause_s)
    await world.reconcile()
    await world.reconcile()
    (successor,) = world.groups - world.deleted()
    assert world.deleted() == {group} and successor != group
    affinity = world.kube.of_kind(STATEFUL_SETS)[successor]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert "node-0" in str(affinity["preferredDuringSchedulingIgnoredDuringExecution"])
    recovered = world.status.recovery
    assert recovered and recovered.message.endswith(f"pod {group}-0 on node node-0: {reason}: no healthy devices")


@pytest.mark.parametrize(("is_serving", "reason"), [(True, "Evicted"), (False, "")], ids=["while serving", "by collector"])
async def test_other_failures_of_pods_do_not_count(is_serving: bool, reason: str) -> None:
    """The garbage collector fails pods of deleted nodes, without a reason."""
    world = World()
    await world.reconcile()
    await world.reconcile()
    if is_serving:
        await world.settle()
    (group,) = world.groups
    replace_failed_pod(world, group, reason, 60)
    await world.reconcile()
    await world.reconcile()
    assert world.status.restarts == 0 and world.ready == ("False", "GroupsNotReady")
