"""The autoscaler in whole reconciles: writes, conditions, and other writers."""

import logging
import pathlib
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from phalanx_api.conditions import find_condition
from phalanx_api.status import MAX_HISTORY
from phalanx_api.summary import BalancePolicy, Budgets, Hotspot, ResponseCachePolicy
from phalanx_operator.decide.scaling import autoscaler, scale
from phalanx_operator.decide.scaling import demand as scale_demand
from phalanx_operator.decide.state.policy import PolicyInputs, PublishedPolicy, router_policy
from phalanx_operator.kube.client import INFERENCE_SERVICES, STATEFUL_SETS, Conflict
from phalanx_operator.routers import PollTiming
from tests.control.builders import NOW, make_service
from tests.control.fake_kube import written_by
from tests.control.simulated_service import rate_for
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import KEY, World

TARGETS = {"ttftP95Ms": 2000, "itlP95Ms": 100}


async def scaled(replicas: int = 1, busy: float = 2.9, **fields: Any) -> World:
    """Returns a settled service with a load of `busy` groups' worth of work, before the first evaluation."""
    world = World(replicas=replicas, autoscaling={"maxReplicas": 9, "targets": TARGETS} | fields)
    world.cluster.start_router_pods()
    await world.settle()
    world.clock = 100.0
    world.routers.summary = summary(*(group(name) for name in world.groups), rate=rate_for(busy))
    return world


def gauge(world: World, name: str) -> float | None:
    return world.metrics.registry.get_sample_value(name, {"namespace": "team", "service": "chat"})


async def test_replicas_are_written_by_the_scale_subresource(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "phalanx.audit")
    world = await scaled()
    writes = await world.reconcile()
    assert "merge inferenceservices/scale chat" in writes
    assert world.service["spec"]["replicas"] == 3
    line = next(record.__dict__ for record in caplog.records if record.__dict__.get("verb") == "scale")
    assert (line["object"], line["service"], line["caller"]) == ("replicas/3", "/".join(KEY), "operator")
    assert line["why"].startswith("Panic: in the last 6 s")
    scaling = world.status.autoscaling
    assert scaling and (scaling.desired, scaling.reason, scaling.last_scale_time) == (3, "Panic", NOW)
    assert scaling.message.startswith("from 1 to 3: in the last 6 s") and (scaling.min_replicas, scaling.max_replicas) == (1, 9)
    assert world.condition("ScalingActive") == ("True", "Active")
    assert ("Normal", "Scaled") in world.events()
    assert gauge(world, "phalanx_operator_desired_groups") == 3
    assert (world.next_s, world.routers.poll_s) == (2.0, 2.0)
    await world.reconcile()
    assert len(world.groups) == 3


async def test_idle_service_is_reconciled_every_15_seconds_without_writes() -> None:
    world = await scaled(busy=0.3)
    await world.reconcile()
    for turn in range(4):
        world.clock = 120.0 + 20.0 * turn
        assert await world.reconcile() == []
        assert (world.next_s, world.routers.poll_s) == (15.0, 15.0)


async def test_conflicting_replicas_cause_a_new_decision() -> None:
    world = await scaled()
    world.kube.failures["merge inferenceservices/scale chat"] = Conflict("the object has changed")
    with pytest.raises(Conflict):
        await world.reconcile()
    assert world.service["spec"]["replicas"] == 1
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 3


def scale_by_other_client(world: World) -> None:
    """Another client wrote the count 30 s ago."""
    body = world.service
    metadata = body["metadata"] | {"managedFields": [written_by("kubectl", "2026-01-02T03:04:30Z")]}
    world.kube.put(INFERENCE_SERVICES, body | {"metadata": metadata, "spec": body["spec"] | {"replicas": 1}})
    world.now, world.clock = "2026-01-02T03:05:00Z", 160.0


async def test_foreign_replicas_are_reported_and_kept_five_minutes() -> None:
    world = await scaled()
    await world.reconcile()
    scale_by_other_client(world)
    writes = await world.reconcile()
    assert not any("scale" in write for write in writes)
    assert world.condition("ScalingActive") == ("False", "ConflictingScaler")
    assert ("Warning", "ConflictingScaler") in world.events()
    world.now, world.clock = "2026-01-02T03:09:31Z", 400.0
    assert "merge inferenceservices/scale chat" in await world.reconcile()
    assert world.condition("ScalingActive") == ("True", "Active")


async def test_foreign_replicas_after_zero_are_reported_without_owner() -> None:
    world = await scaled()
    await world.reconcile()
    body = world.service
    metadata = body["metadata"] | {"managedFields": []}
    world.kube.put(INFERENCE_SERVICES, body | {"metadata": metadata})
    world.now, world.clock = "2026-01-02T03:05:00Z", 160.0
    await world.reconcile()
    assert world.condition("ScalingActive") == ("True", "Active"), "the count is the operator's own"
    body = world.service
    world.kube.put(INFERENCE_SERVICES, body | {"spec": body["spec"] | {"replicas": 7}})
    for minute in range(5):
        world.now, world.clock = f"2026-01-02T03:{10 + minute}:00Z", 400.0 + 60 * minute
        writes = await world.reconcile()
        assert not any("scale" in write for write in writes), (minute, writes, world.service["status"])
        assert world.condition("ScalingActive") == ("False", "ConflictingScaler")
    world.now, world.clock = "2026-01-02T03:15:01Z", 701.0
    assert "merge inferenceservices/scale chat" in await world.reconcile()
    assert world.condition("ScalingActive") == ("True", "Active")


async def test_first_writer_of_replicas_is_no_other_writer() -> None:
    world = await scaled()
    body = world.service
    metadata = body["metadata"] | {"managedFields": [written_by("kubectl", NOW)]}
    world.kube.put(INFERENCE_SERVICES, body | {"metadata": metadata})
    assert "merge inferenceservices/scale chat" in await world.reconcile()


async def test_silent_routers_hold_replicas_with_a_condition() -> None:
    world = await scaled()
    world.routers.summary = None
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 1
    assert world.condition("ScalingActive") == ("False", "MetricsUnavailable")
    assert world.condition("Balanced") == ("Unknown", "RoutersSilent")


@pytest.mark.parametrize(("mode", "reason"), [("External", "External"), ("Advisory", "Advisory")])
async def test_other_modes_recommend_and_do_not_write(mode: str, reason: str) -> None:
    world = await scaled(mode=mode)
    assert not any("scale" in write for write in await world.reconcile())
    assert world.service["spec"]["replicas"] == 1
    assert world.condition("ScalingActive") == ("True", reason)
    scaling = world.status.autoscaling
    assert scaling and (scaling.desired, scaling.last_scale_time) == (3, "")
    assert gauge(world, "phalanx_operator_desired_groups") == 3
    await world.change(replicas=2)
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 2


async def test_service_without_autoscaling_has_no_scaling_condition() -> None:
    world = World()
    await world.settle()
    assert world.status.autoscaling is None
    assert "ScalingActive" not in {condition.type for condition in world.status.conditions}
    assert gauge(world, "phalanx_operator_desired_groups") is None


async def test_a_suspended_service_is_not_scaled() -> None:
    world = await scaled()
    await world.change(suspend=True)
    await world.reconcile()
    assert world.condition("ScalingActive") == ("False", "Disabled")
    assert world.service["spec"]["replicas"] == 1


async def test_schedules_apply_without_reports() -> None:
    world = await scaled(busy=0.2, schedules=[{"cron": "0 3 * * *", "min": 4}])
    world.routers.summary = None
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 4
    scaling = world.status.autoscaling
    assert scaling and (scaling.reason, scaling.bounds) == ("Bounds", "schedules[0], 0 3 * * * UTC")


async def test_to_zero_and_back_at_the_first_request() -> None:
    world = await scaled(busy=0.0, minReplicas=0, scaleToZero={"enabled": True, "idleSeconds": 60})
    name = next(iter(world.groups))
    world.routers.summary = summary(group(name, streams=0, running=0), evacuated=[name])
    await world.settle()
    assert (world.groups, world.service["spec"]["replicas"], world.ready) == (set(), 0, ("True", "ScaledToZero"))
    assert (world.routers.policy.max_held, world.routers.policy.hold_s) == (100, 600.0)
    world.routers.summary = summary(held=1, queued=1, queued_tokens=10)
    await world.settle()
    assert len(world.groups) == 1


async def test_how_long_groups_take_to_start_is_remembered() -> None:
    world = await scaled(busy=0.3)
    await world.reconcile()
    assert world.status.autoscaling and world.status.autoscaling.cold_start_seconds == 0
    await world.change(replicas=2)
    await world.reconcile()
    await world.reconcile()
    made = max(body["metadata"]["creationTimestamp"] for body in world.kube.of_kind(STATEFUL_SETS).values())
    world.now = f"2026-01-01T00:{int(made[14:16]) + 1:02}:30Z"
    world.cluster.start_pods()
    await world.reconcile()
    assert world.status.autoscaling.cold_start_seconds == 90


async def test_new_leader_counts_existing_groups_as_started() -> None:
    world = await scaled(busy=0.3)
    await world.reconcile()
    world.cluster.start_pods(ready=False)
    world.reconciler.states.clear()
    await world.reconcile()
    world.now = "2026-01-05T00:00:00Z"
    world.cluster.start_pods()
    await world.reconcile()
    assert world.status.autoscaling and world.status.autoscaling.cold_start_seconds == 0


HOT = Hotspot(group="chat-g-aaaaa", cause="kv", signal=0.95, median=0.5, since_s=12.0, action="migrate")


async def test_lasting_hotspot_and_its_end_are_reported_once() -> None:
    world = World()
    world.cluster.start_router_pods()
    await world.settle()
    world.routers.summary = summary(hotspots=[replace_hot(since_s=2.0)])
    await world.reconcile()
    assert world.condition("Balanced") == ("True", "Balanced")
    world.routers.summary = summary(hotspots=[HOT])
    await world.reconcile()
    assert world.condition("Balanced") == ("False", "KvBound")
    expected = ("chat-g-aaaaa", "KvBound", "2026-01-02T03:03:53Z", "migrate")
    assert [(h.group, h.cause, h.since, h.action) for h in world.status.rebalancing.hotspots] == [expected]
    assert gauge(world, "phalanx_service_hot_groups") == 1
    world.now = "2026-01-02T03:04:25Z"
    world.routers.summary = summary(hotspots=[replace_hot(signal=0.97, since_s=31.4)])
    assert await world.reconcile() == []
    world.routers.summary = summary()
    await world.reconcile()
    assert (world.condition("Balanced"), world.status.rebalancing.hotspots) == (("True", "Balanced"), ())
    assert [n for n in world.events() if n[1] in ("KvBound", "Balanced")] == [("Warning", "KvBound"), ("Normal", "Balanced")]
    assert gauge(world, "phalanx_service_hot_groups") == 0


def replace_hot(**fields: Any) -> Hotspot:
    return Hotspot(**{name: getattr(HOT, name) for name in HOT.__struct_fields__} | fields)


async def test_a_saturated_fleet_is_no_matter_of_one_group() -> None:
    world = World()
    world.cluster.start_router_pods()
    await world.settle()
    world.routers.summary = summary(hotspots=[HOT], fleet_saturated=True)
    await world.reconcile()
    assert world.condition("Balanced") == ("False", "FleetSaturated")
    messages = [condition.message for condition in world.status.conditions if condition.type == "Balanced"]
    assert "kubectl phalanx explain" in messages[0]


async def test_no_more_hotspots_are_listed_than_the_schema_takes() -> None:
    world = World()
    world.cluster.start_router_pods()
    await world.settle()
    world.routers.summary = summary(hotspots=[replace_hot(group=f"g{i:02}") for i in range(40)])
    await world.reconcile()
    assert len(world.status.rebalancing.hotspots) == 16


def test_budgets_are_divided_by_the_routers() -> None:
    budgets = {"movesPerGroup": 5, "bandwidth": "1Gi", "liveTokensPercentPerSecond": 4}
    spec = make_service(
        rebalancing={"mode": "Requeue", "budgets": budgets}, autoscaling={"maxReplicas": 2, "targets": TARGETS}
    ).spec
    policy = router_policy(spec, PolicyInputs(routers=2, evacuate=("a",)), 7)
    assert policy == BalancePolicy(
        number=7,
        mode="Requeue",
        routers=2,
        budgets=Budgets(moves_per_group=2, bytes_per_s=float(1 << 29), tokens_share_per_s=0.02),
        ttft_target_s=2.0,
        itl_target_s=0.1,
        evacuate=["a"],
        coalesce_requests=True,
    )
    assert router_policy(spec, PolicyInputs(routers=64)).budgets.moves_per_group == 1


@pytest.mark.parametrize("routing", ["PrefixAware", "LeastLoad", "RoundRobin"])
@pytest.mark.parametrize(("mode", "fails_open"), [("FailOpen", True), ("FailClosed", False)])
def test_routers_receive_routing_and_failure_policy(routing: str, mode: str, fails_open: bool) -> None:
    policy = router_policy(make_service(router={"policy": routing, "failureMode": mode}).spec, PolicyInputs(routers=1))
    assert (policy.routing, policy.fails_open) == (routing, fails_open)


def test_routers_receive_the_limits_of_the_response_cache() -> None:
    fields = {"exact": True, "ttlSeconds": 60, "maxEntries": 5, "maxBytes": "1Mi", "scope": "service"}
    policy = router_policy(make_service(router={"responseCache": fields}).spec, PolicyInputs(routers=3))
    assert policy.response_cache == ResponseCachePolicy(ttl_s=60.0, max_entries=5, max_bytes=1 << 20, scope="service")
    defaults = router_policy(make_service(router={"responseCache": {"exact": True}}).spec, PolicyInputs(routers=1))
    assert defaults.response_cache == ResponseCachePolicy(), "the defaults of both agree"
    fields = {"semantic": True, "similarity": 0.9, "embedder": "small", "recheckShare": 0.5}
    semantic = router_policy(make_service(router={"responseCache": fields}).spec, PolicyInputs(routers=1)).response_cache
    expected = ResponseCachePolicy(exact=False, semantic=True, similarity=0.9, embedder="small", recheck_share=0.5)
    assert semantic == expected
    off = make_service(router={"responseCache": fields | {"semantic": False}})
    assert router_policy(off.spec, PolicyInputs(routers=1)).response_cache is None


def test_default_policy_routes_by_cost_and_fails_open() -> None:
    assert router_policy(make_service().spec, PolicyInputs(routers=1), 7) == BalancePolicy(number=7, coalesce_requests=True)


def test_policy_number_rises_only_with_a_change() -> None:
    spec = make_service().spec
    evacuating = PolicyInputs(routers=1, evacuate=("a",))
    first = PublishedPolicy().update(spec, evacuating, 1000.0)
    same = first.update(spec, evacuating, 2000.0)
    later = same.update(spec, PolicyInputs(routers=1), 900.0)
    assert [published.policy.number for published in (first, same, later)] == [1000, 1000, 1001]


def test_policy_after_an_operator_restart_replaces_the_old_one() -> None:
    """A router ignores a policy with a lower number, so even the default policy needs one."""
    spec = make_service().spec
    before = PublishedPolicy().update(spec, PolicyInputs(routers=1, evacuate=("a",)), 1000.0)
    after = PublishedPolicy().update(spec, PolicyInputs(routers=1), 1001.0)
    assert after.policy == BalancePolicy(number=1001, coalesce_requests=True) and after.policy.number > before.policy.number
    assert after.update(spec, PolicyInputs(routers=1), 2000.0) is after, "no change, no new number"


def test_policy_of_a_late_clock_replaces_the_old_one() -> None:
    """The time of a restored API server may be behind; routers report the number that they follow."""
    spec = make_service().spec
    before = PublishedPolicy().update(spec, PolicyInputs(routers=1, evacuate=("a",)), 4600.0)
    restarted = PublishedPolicy().update(spec, PolicyInputs(routers=1), 1000.0)
    assert restarted.policy.number == 1000
    fleet = fleet_of(summary(policy=1000), summary(policy=before.policy.number))
    replaced = restarted.update(spec, PolicyInputs(routers=1, reported_number=fleet.policy_number), 1001.0)
    assert replaced.policy == replace(restarted.policy, number=before.policy.number + 1)
    assert replaced.update(spec, PolicyInputs(routers=1, reported_number=replaced.policy.number), 1002.0) is replaced


def test_the_example_in_the_guide_is_valid() -> None:
    guide = (pathlib.Path(__file__).parents[4] / "docs" / "scaling.md").read_text()
    spec = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0])["spec"]
    scaling = make_service(**spec).spec.autoscaling
    assert scaling and scaling.schedules[1].max == 2


@pytest.mark.parametrize(
    ("words", "constant"),
    [
        ("at 75 % busy", scale_demand.BUSY == 0.75),
        ("at most 0.8 of `ttftP95Ms`", scale_demand.TTFT_SHARE == 0.8),
        ("one more for each 10 s", scale_demand.DRAIN_S == 10.0),
        ("doubling, or 4 more, in 15 s", (scale.OUT_STEP, scale.TICK_S) == (4, 15.0)),
        ("1.5 times as many", scale.PANIC == 1.5),
        ("pages at most 70 % full", scale_demand.KV_IN_SHARE * scale_demand.KV_SHARE == pytest.approx(0.7)),
        ("for 300 s, or for 60 s", (scale.SLOW_IN_S, scale.FAST_IN_S) == (300.0, 60.0)),
        ("in the last 45 s", PollTiming().stale_s == 45.0),
        ("silent for 45 s more", scale.SILENT_S == 45.0),
        ("its `history` the last five changes", MAX_HISTORY == 5),
        ("leaves that count for five minutes", autoscaler.CONFLICT_S == 300.0),
    ],
)
def test_guide_states_the_constants_of_the_rule(words: str, constant: bool) -> None:
    guide = " ".join((pathlib.Path(__file__).parents[4] / "docs" / "scaling.md").read_text().split())
    assert words in guide and constant


FALLBACK: dict[str, Any] = {"onMetricsLoss": "Fallback", "fallbackReplicas": 4}


async def test_long_silence_sets_the_fallback_replicas() -> None:
    world = await scaled(busy=0.3, **FALLBACK)
    await world.reconcile()
    world.routers.summary = None
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 1, "a new leader has no reports either"
    world.clock += scale.SILENT_S
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 4
    condition = find_condition(world.status.conditions, "ScalingActive")
    assert condition and (condition.status, condition.reason) == ("False", "MetricsUnavailable")
    assert condition.message.endswith("the count is held, and is at least 4 after 45 s")
    scaling = world.status.autoscaling
    assert scaling and (scaling.reason, scaling.desired) == ("Fallback", 4)
    await world.settle()
    await world.change(replicas=6)
    world.clock += 60.0
    await world.reconcile()
    assert world.service["spec"]["replicas"] == 6, "no group is removed without reports"


async def test_status_lists_the_last_changes_newest_last() -> None:
    world = await scaled(busy=0.2, minReplicas=1)
    for count in range(2, 9):
        policy = world.service["spec"]["autoscaling"] | {"minReplicas": count}
        await world.change(autoscaling=policy)
        world.now = f"2026-01-02T03:1{count}:00Z"
        await world.reconcile()
    scaling = world.status.autoscaling
    assert scaling and [(change.before, change.after, change.reason) for change in scaling.history] == [
        (count - 1, count, "Bounds") for count in range(4, 9)
    ]
    assert scaling.history[-1].time == "2026-01-02T03:18:00Z" == scaling.last_scale_time
    assert scaling.history[-1].message == "7 groups, between 8 and 9 are allowed"
    before = scaling.history
    await world.reconcile()
    assert world.status.autoscaling and world.status.autoscaling.history == before, "only changes are recorded"


async def test_blocked_write_is_no_change() -> None:
    world = await scaled()
    await world.reconcile()
    scale_by_other_client(world)
    await world.reconcile()
    assert world.condition("ScalingActive") == ("False", "ConflictingScaler")
    assert world.status.autoscaling and len(world.status.autoscaling.history) == 1


async def test_recommendation_is_reported_once_per_change() -> None:
    world = await scaled(mode="Advisory")
    for _ in range(3):
        await world.reconcile()
    scaling = world.status.autoscaling
    assert scaling and [(change.before, change.after, change.reason) for change in scaling.history] == [(1, 3, "Panic")]
