"""The operator decides every type, status and reason of a condition in some case."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import pytest

from phalanx_api.cache_curve import NO_TIERS, CacheCurve, TierCurve
from phalanx_api.conditions import Cause, Condition, ConditionType, Reason, find_condition
from phalanx_api.spec.router import RouterTls
from phalanx_api.status import AutoscalingStatus, RollbackStatus, Status
from phalanx_api.summary import Hotspot
from phalanx_api.wire import DeviceProblem, RefusedAdapter
from phalanx_operator.decide.conditions import adapters, cache, capacity, devices, holds, traffic
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.conditions.status import NO_REPORTS, service_status, with_failed_call
from phalanx_operator.decide.groups import rollback
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import Hold, ObservedGroup, ObservedRouter, ReplicasWriter, with_assessment
from phalanx_operator.kube.client import INFERENCE_SERVICES, Rejected
from phalanx_operator.observe.certificate import judge
from tests.certificates import issue
from tests.control.builders import NOW, SETTLED_ROUTER, make_desired, make_group, make_service, make_snapshot
from tests.control.condition_table import ALLOWED, verdicts
from tests.control.kstatus import kstatus
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

Conditions = Iterable[Condition]
LATER = "2027-01-01T00:00:00Z"
QUOTA = "exceeded quota: groups"
NO_ROUTER = ObservedRouter(replicas=1, updated=1, ready=0, is_current=True)
READY, OLD, STARTS = make_group("a"), make_group("a", "old"), make_group("a", ready=False)
ALIVE = make_group("a", ready=False, alive_reason="routers report it")
SILENT = Fleet(polled=2)


def unplaced(reason: str, message: str = "") -> ObservedGroup:
    """Returns a group with pods that have no node."""
    pods = tuple(replace(pod, node="", ready=False, reason=reason, message=message) for pod in STARTS.pods)
    return replace(STARTS, pods=pods)


def conditions_of(
    *groups: ObservedGroup,
    replicas: int = 1,
    suspended: bool = False,
    router: Any = SETTLED_ROUTER,
    fleet: Fleet = NO_REPORTS,
    **wanted: Any,
) -> Conditions:
    """Returns the conditions of these groups."""
    return service_status(
        make_snapshot(*groups, router=router), make_desired(replicas, **wanted), fleet, suspended=suspended, now=NOW
    ).conditions


def capacity_of(group: ObservedGroup, turn: PlacementTurn = FREE) -> Conditions:
    return capacity.with_capacity_condition(Status(), make_snapshot(group), turn, "", LATER).conditions


def cache_of(group: ObservedGroup, death: str = "") -> Conditions:
    """Returns the condition of the cache after this death of the group."""
    model = make_service(model={"uri": "hf://org/x", "cache": {"type": "Shared", "claimName": "models"}}).spec.model
    return model_conditions.with_model_cached_condition(
        Status(), model, make_snapshot(group), fleet_with_death(death), NOW
    ).conditions


def fleet_with_death(death: str) -> Fleet:
    return fleet_of(summary(group("a", deaths=1, death=death)))


def scaling_with(
    fleet: Fleet, mode: str = "Internal", *, suspend: bool = False, writer: ReplicasWriter | None = None
) -> Conditions:
    spec = {"maxReplicas": 4, "targets": {"itlP95Ms": 50}, "mode": mode}
    service = make_service(autoscaling=spec, suspend=suspend)
    former = Status(autoscaling=AutoscalingStatus(desired=1, last_scale_time=NOW))
    snapshot = make_snapshot(READY, status=former, replicas_writer=writer)
    _, scaling = autoscaler.autoscale(service, snapshot, fleet, AutoscalerState(), NOW, 0.0)
    return autoscaler.with_scaling_conditions(snapshot.status, service, scaling, snapshot, NOW).conditions


def balance_of(fleet: Fleet) -> Conditions:
    return traffic.with_balanced_condition(Status(), fleet, make_snapshot(READY), NOW).conditions


def hot(cause: Cause) -> Fleet:
    return Fleet(
        polled=1, answered=1, hotspots=(Hotspot(group="a", cause=cause, signal=1.0, median=0.1, since_s=60.0, action="steer"),)
    )


def compatibility_after(*fleets: Fleet) -> Conditions:
    """Returns the condition after these reports."""
    status = Status()
    for fleet in fleets:
        status = traffic.with_compatible_condition(status, fleet, make_snapshot(READY, status=status), NOW)
    return status.conditions


def speculation_of(*reports: Any) -> Conditions:
    engine = make_service(engine={"speculative": {"method": "NGram"}}).spec.engine
    return traffic.with_speculating_condition(
        Status(), engine, make_snapshot(READY), "new", fleet_of(summary(*reports)), NOW
    ).conditions


def with_problem(kind: Literal["fault", "throttled"]) -> Fleet:
    return fleet_of(summary(group("a", devices=[DeviceProblem(kind=kind, pod=0, device=1)])))


def devices_after(*fleets: Fleet) -> Conditions:
    """Returns the condition after these reports."""
    status = Status()
    for fleet in fleets:
        status = devices.with_devices_condition(status, fleet, make_snapshot(READY, status=status), NOW)
    return status.conditions


def held_for(reason: Reason) -> Conditions:
    return holds.with_held_condition(Status(), make_snapshot(make_group("a", hold=Hold(reason, "why"))), NOW).conditions


def certificate_of(data: Mapping[str, str] | None) -> Conditions:
    snapshot = make_snapshot(READY, certificate=judge("a", data, NOW))
    return traffic.with_certificate_condition(Status(), RouterTls(secret_name="a"), snapshot, NOW).conditions


def partition_of(group: ObservedGroup) -> Conditions:
    return holds.with_partition_condition(Status(), make_snapshot(group), NOW).conditions


def cache_size_of(lookups: int, *hit_rates: float, tiers: TierCurve = NO_TIERS) -> Conditions:
    curve = CacheCurve(lookups, list(hit_rates), tiers)
    return cache.with_cache_condition(
        Status(),
        make_service().spec.engine,
        fleet=fleet_of(summary(group("a", cache_curve=curve, total_pages=1000))),
        snapshot=make_snapshot(READY),
        revision="new",
        now=NOW,
    ).conditions


def adapters_of(*reports: Any) -> Conditions:
    declared = make_service(engine={"maxAdapters": 2}, adapters=[{"name": "legal", "uri": "file:///legal"}]).spec.adapters
    return adapters.with_adapters(Status(), declared, fleet_of(summary(*reports)), make_snapshot(READY), NOW).conditions


def rolled_back() -> Conditions:
    note = RollbackStatus(revision="new", to="old", message="late", since=NOW)
    snapshot = make_snapshot(OLD)
    good = service_status(snapshot, make_desired(1, "old"), suspended=False, now=NOW)
    return rollback.with_rollback_condition(good, note, "", snapshot, NOW).conditions


def unexposed() -> Conditions:
    snapshot = make_snapshot(READY)
    return traffic.with_router_error(
        service_status(snapshot, make_desired(1), suspended=False, now=NOW), "no such kind", snapshot, NOW
    ).conditions


def failing(group: ObservedGroup) -> Conditions:
    snapshot = make_snapshot(group)
    status = service_status(snapshot, make_desired(1), suspended=False, now=NOW)
    return with_failed_call(status, "a webhook is down", snapshot, NOW).conditions


ANSWERED, INCOMPATIBLE = Fleet(polled=1, answered=1), Fleet(polled=1, answered=1, unknown_versions=("group a: speaks 9",))
CLAIM = unplaced("Unschedulable", 'persistentvolumeclaim "models" not found')
SHORT = replace(STARTS, pods=STARTS.pods[:1], incomplete_since=NOW)
WAITS = PlacementTurn(why="another group is placed first", retry_s=1.0, is_reported=True)
CASES: list[tuple[str, Callable[[], Conditions]]] = [
    ("Ready True Ready, Available True Serving, Progressing True Complete, RouterReady True Ready", lambda: conditions_of(READY)),
    ("Ready True Suspended, Available False NoReadyGroup", lambda: conditions_of(replicas=0, suspended=True)),
    ("Ready True ScaledToZero, Available False Holding", lambda: conditions_of(replicas=0, holds_requests=True)),
    ("Ready False ImagePullFailed", lambda: conditions_of(unplaced("ErrImagePull"))),
    ("Ready False PodFailing", lambda: conditions_of(unplaced("CrashLoopBackOff"))),
    ("Ready False InsufficientCapacity", lambda: conditions_of(unplaced("Unschedulable"))),
    ("Ready False QuotaExceeded", lambda: conditions_of(replace(STARTS, rejection=QUOTA))),
    ("Ready False Rejected", lambda: conditions_of(replace(STARTS, rejection="a webhook says no"))),
    ("Ready False RestartBudgetSpent, Stalled True RestartBudgetSpent", lambda: conditions_of(STARTS, spent_reason="a died")),
    ("Ready False RollingOut, Progressing True Rolling, Reconciling True Rolling", lambda: conditions_of(OLD)),
    ("Ready False GroupsNotReady, Progressing True Scaling, Reconciling True Scaling", lambda: conditions_of(STARTS)),
    ("Ready False GroupsNotReady, Reconciling True Retrying", lambda: failing(STARTS)),
    ("Ready False Unreachable", lambda: conditions_of(ALIVE)),
    (
        "Ready False RouterNotReady, RouterReady False RouterNotReady, Available False RouterNotReady",
        lambda: conditions_of(READY, router=NO_ROUTER),
    ),
    ("Available True Unreachable", lambda: conditions_of(ALIVE, router=NO_ROUTER, fleet=fleet_of(summary(group("a"))))),
    (
        "Available True NodesSilent",
        lambda: conditions_of(with_assessment(ALIVE, kept_reason="x"), router=NO_ROUTER, fleet=fleet_of(summary(group("a")))),
    ),
    (
        "Progressing True SurgeUnschedulable, Reconciling True SurgeUnschedulable",
        lambda: conditions_of(OLD, no_surge_reason="none"),
    ),
    ("Progressing Unknown Paused", lambda: conditions_of(OLD, paused=True)),
    (
        "Progressing False ProgressDeadlineExceeded, Stalled True ProgressDeadlineExceeded",
        lambda: conditions_of(OLD, late_reason="a is not ready"),
    ),
    ("Ready False RolledBack, Progressing False RolledBack, Stalled True RolledBack", rolled_back),
    ("RouterReady False Rejected, Ready False Rejected, Stalled True Rejected", unexposed),
    ("CapacityAvailable True Scheduled", lambda: capacity_of(READY)),
    ("CapacityAvailable False Unschedulable", lambda: capacity_of(unplaced("Unschedulable"))),
    ("CapacityAvailable False GangWaiting", lambda: capacity_of(unplaced("SchedulingGated"))),
    ("CapacityAvailable False GangWaiting", lambda: capacity_of(READY, WAITS)),
    ("CapacityAvailable False QuotaExceeded", lambda: capacity_of(replace(STARTS, rejection=QUOTA))),
    ("CapacityAvailable False Rejected", lambda: capacity_of(SHORT)),
    ("AdaptersReady True AdaptersUsable", lambda: adapters_of(group("a", adapters=[]))),
    ("AdaptersReady Unknown NoReadyGroup", lambda: adapters_of(group("a"))),
    (
        "AdaptersReady False AdapterRefused",
        lambda: adapters_of(group("a", adapters=[], refused_adapters=[RefusedAdapter("legal", "its rank is 64")])),
    ),
    (
        "AdaptersReady False AdapterFailing",
        lambda: adapters_of(group("a", adapters=[], refused_adapters=[RefusedAdapter("legal", "no answer", is_final=False)])),
    ),
    ("ModelCached True Cached", lambda: cache_of(READY)),
    ("ModelCached Unknown Downloading", lambda: cache_of(STARTS)),
    ("ModelCached False AuthFailed", lambda: cache_of(STARTS, "pod 0: the hub refuses the token for org/x")),
    ("ModelCached False NotFound", lambda: cache_of(STARTS, "pod 0: there is no model org/x")),
    ("ModelCached False ClaimUnbound", lambda: cache_of(CLAIM)),
    ("ScalingActive True Active", lambda: scaling_with(fleet_of(summary(group())))),
    ("ScalingActive True External", lambda: scaling_with(fleet_of(summary(group())), "External")),
    ("ScalingActive True Advisory", lambda: scaling_with(fleet_of(summary(group())), "Advisory")),
    ("ScalingActive False MetricsUnavailable", lambda: scaling_with(SILENT)),
    (
        "ScalingActive False ConflictingScaler",
        lambda: scaling_with(fleet_of(summary(group())), writer=ReplicasWriter("hpa", NOW)),
    ),
    ("ScalingActive False Disabled", lambda: scaling_with(SILENT, suspend=True)),
    ("Balanced True Balanced", lambda: balance_of(ANSWERED)),
    ("Balanced Unknown RoutersSilent", lambda: balance_of(SILENT)),
    ("Balanced False FleetSaturated", lambda: balance_of(replace(ANSWERED, saturated=True))),
    ("Balanced False KvBound", lambda: balance_of(hot("kv"))),
    ("Balanced False PrefillBound", lambda: balance_of(hot("prefill"))),
    ("Balanced False DecodeBound", lambda: balance_of(hot("decode"))),
    ("Balanced False PrefixSkew", lambda: balance_of(hot("prefix"))),
    ("Balanced False Straggler", lambda: balance_of(hot("straggler"))),
    ("Balanced False ImminentFull", lambda: balance_of(hot("full"))),
    ("Compatible False UnknownVersion", lambda: compatibility_after(ANSWERED, INCOMPATIBLE)),
    ("Compatible True VersionsAgree", lambda: compatibility_after(INCOMPATIBLE, ANSWERED)),
    ("Speculating True Proposing", lambda: speculation_of(group("a"))),
    ("Speculating False DraftLost", lambda: speculation_of(group("a", draft_lost="no tensors"))),
    ("Speculating Unknown NoReadyGroup", lambda: speculation_of()),
    *(
        (f"DisruptionsHeld True {reason}", lambda reason=reason: held_for(reason))
        for reason in (Reason.STRAGGLERS_TOGETHER, Reason.RESTARTS_TOGETHER, Reason.CLOCK_CHANGED)
    ),
    ("ControlPlanePartitioned True NodesSilent", lambda: partition_of(make_group("a", kept_reason="2 of 3 nodes are silent"))),
    ("CertificateValid True Valid", lambda: certificate_of(issue("a").secret_data)),
    ("CertificateValid False Expired", lambda: certificate_of(issue("a", ends_at=NOW).secret_data)),
    ("CertificateValid False NotFound", lambda: certificate_of(None)),
    ("CertificateValid False InvalidCertificate", lambda: certificate_of({})),
    ("CacheSized True WorkingSetFits", lambda: cache_size_of(4000, 0.4, 0.5, 0.54, 0.6)),
    ("CacheSized False TooFewPages", lambda: cache_size_of(4000, 0.4, 0.5, 0.56, 0.6)),
    (
        "CacheSized False TooFewHostPages",
        lambda: cache_size_of(4000, 0.4, 0.5, 0.5, 0.5, tiers=TierCurve(1000, [0.5, 0.5, 0.56, 0.6], 0.5)),
    ),
    ("CacheSized Unknown TooFewLookups", lambda: cache_size_of(3999, 0.4, 0.5, 0.56, 0.6)),
    ("DevicesHealthy False DeviceFault", lambda: devices_after(with_problem("fault"))),
    ("DevicesHealthy False DeviceThrottled", lambda: devices_after(with_problem("throttled"))),
    ("DevicesHealthy True Healthy", lambda: devices_after(with_problem("fault"), ANSWERED)),
]


@pytest.mark.parametrize(("expected", "decide"), CASES)
def test_condition_table(expected: str, decide: Callable[[], Conditions]) -> None:
    assert set(expected.split(", ")) <= verdicts(decide())


REJECTED = "Ready False {0}, Progressing False {0}, Stalled True {0}"
NO_GROUP = f"{REJECTED}, CapacityAvailable False {{0}}"
REJECTIONS: list[tuple[str, dict[str, Any], str]] = [
    (REJECTED.format("SpecInvalid"), {"parallelism": {"tensor": 4, "gpusPerPod": 3}}, ""),
    (NO_GROUP.format("Rejected"), {}, "a webhook says no"),
    (NO_GROUP.format("QuotaExceeded"), {}, QUOTA),
]


@pytest.mark.parametrize(("expected", "spec", "error"), REJECTIONS)
async def test_rejection_condition_table(expected: str, spec: dict[str, Any], error: str) -> None:
    """`error`: of the API server that rejects the group."""
    world = World(**spec)
    if error:
        create = next(call for call in await World().reconcile() if "statefulsets" in call)
        world.kube.failures[create] = Rejected(error)
    with contextlib.suppress(Rejected):
        await world.reconcile()
    assert set(expected.split(", ")) <= verdicts(world.status.conditions)
    assert kstatus(world.service) == "Failed"


def test_kstatus_agrees_with_every_condition() -> None:
    states: set[str] = set()
    for expected, decide in CASES:
        conditions = tuple(decide())
        if not find_condition(conditions, "Ready"):
            continue  # part of a status
        state = "Failed" if "Stalled True" in expected else "Current" if "Ready True" in expected.split(", ")[0] else "InProgress"
        stored = Status(observed_generation=7, conditions=conditions).model_dump(by_alias=True)
        assert kstatus({"metadata": {"generation": 7}, "status": stored}) == state, expected
        assert kstatus({"metadata": {"generation": 8}, "status": stored}) == "InProgress", "the spec is not observed"
        states.add(state)
    assert states == {"Current", "InProgress", "Failed"}


async def test_kstatus_follows_creation_and_change_of_a_service() -> None:
    world = World()
    await world.reconcile()
    assert kstatus(world.service) == "InProgress"
    await world.settle()
    assert kstatus(world.service) == "Current"
    changed = world.service
    world.kube.put(INFERENCE_SERVICES, changed | {"metadata": changed["metadata"] | {"generation": 2}})
    assert (kstatus(world.service), world.ready) == ("InProgress", ("True", "Ready"))
    await world.reconcile()
    assert kstatus(world.service) == "Current"


def test_every_condition_and_reason_occurs_in_a_case() -> None:
    cases = [expected for expected, _ in CASES] + [expected for expected, _, _ in REJECTIONS]
    assert {verdict for case in cases for verdict in case.split(", ")} == ALLOWED
    kinds, _, reasons = zip(*(verdict.split() for verdict in ALLOWED), strict=True)
    assert (set(kinds), set(reasons)) == (set(get_args(ConditionType)), {reason.value for reason in Reason})


GROUPS = [READY, OLD, STARTS, SHORT, *map(unplaced, ("ErrImagePull", "Error", "Unschedulable"))]
GROUPS += [replace(STARTS, rejection=message) for message in (QUOTA, "no")]
FLAGS = [
    dict(zip(("late_reason", "spent_reason", "no_surge_reason"), reasons, strict=True))
    for reasons in itertools.product(("", "why"), repeat=3)
]


SETTINGS: list[tuple[Any, ...]] = list(itertools.product((SETTLED_ROUTER, NO_ROUTER, None), (0, 1), *[(False, True)] * 2))


@pytest.mark.parametrize("wanted", FLAGS, ids=lambda flags: ",".join(name for name, reason in flags.items() if reason) or "none")
def test_groups_and_routers_have_no_other_conditions(wanted: dict[str, Any]) -> None:
    """All combinations of up to two groups with every setting."""
    found: set[str] = set()
    for groups in itertools.chain([()], itertools.combinations(GROUPS, 1), itertools.combinations(GROUPS, 2)):
        for router, replicas, paused, suspended in SETTINGS:
            fields = wanted | {"paused": paused, "holds_requests": not suspended}
            found |= verdicts(conditions_of(*groups, replicas=replicas, suspended=suspended, router=router, **fields))
    assert found <= ALLOWED
