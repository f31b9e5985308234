"""Every type, status and reason of a condition is what the operator decides in some case here; the lists are compared.

The cases are decided by whole functions of `phalanx_operator.decide`, or in a world, never by giving the reason itself.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest

from phalanx_api.conditions import Condition, ConditionType, Reason, find_condition
from phalanx_api.status import AutoscalingStatus, RollbackStatus, Status
from phalanx_api.summary import Cause, Hotspot
from phalanx_operator.decide.conditions import capacity, traffic
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.conditions.status import status
from phalanx_operator.decide.groups import rollback
from phalanx_operator.decide.groups.admission import FREE, PlacementTurn
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedRouter, ReplicasWriter
from phalanx_operator.kube.client import SERVICES_OF_OURS, Rejected
from tests.control.builders import NOW, SETTLED_ROUTER, make_desired, make_group, make_service, make_snapshot
from tests.control.kstatus import kstatus
from tests.control.said import SAID, said
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

Conditions = Iterable[Condition]
LATER = "2027-01-01T00:00:00Z"
QUOTA = "exceeded quota: groups"
NO_ROUTER = ObservedRouter(wanted=1, updated=1, ready=0, current=True)
WELL, OLD, STARTS = make_group("a"), make_group("a", "old"), make_group("a", ready=False)
SILENT = Fleet(asked=2)


def held_up(reason: str, message: str = "") -> ObservedGroup:
    """A group whose pods have no node, or say what is wrong."""
    pods = tuple(replace(pod, node="", ready=False, reason=reason, message=message) for pod in STARTS.pods)
    return replace(STARTS, pods=pods)


def whole(
    *groups: ObservedGroup, replicas: int = 1, suspended: bool = False, router: Any = SETTLED_ROUTER, **wanted: Any
) -> Conditions:
    """What is said of these groups, where so many are wanted."""
    return status(
        make_snapshot(*groups, router=router), make_desired(replicas, **wanted), suspended=suspended, now=NOW
    ).conditions


def placed(group: ObservedGroup, turn: PlacementTurn = FREE) -> Conditions:
    return capacity.with_capacity_condition(Status(), make_snapshot(group), turn, "", LATER).conditions


def kept(group: ObservedGroup, death: str = "") -> Conditions:
    """What is said of the cache while the last start of the group ended so."""
    model = make_service(model={"uri": "hf://org/x", "cache": {"type": "Shared", "claimName": "models"}}).spec.model
    return model_conditions.with_model_cached_condition(Status(), model, make_snapshot(group), dying(death), NOW).conditions


def dying(death: str) -> Fleet:
    return fleet_of(summary(group("a", deaths=1, death=death)))


def scaled(fleet: Fleet, mode: str = "Internal", *, suspend: bool = False, writer: ReplicasWriter | None = None) -> Conditions:
    spec = {"maxReplicas": 4, "targets": {"itlP95Ms": 50}, "mode": mode}
    service = make_service(autoscaling=spec, suspend=suspend)
    former = Status(autoscaling=AutoscalingStatus(desired=1, last_scale_time=NOW))
    seen = make_snapshot(WELL, status=former, replicas_writer=writer)
    _, scaling = autoscaler.scaling(service, seen, fleet, AutoscalerState(), NOW, 0.0)
    return autoscaler.with_scaling_conditions(seen.status, service, scaling, seen, NOW).conditions


def balances(fleet: Fleet) -> Conditions:
    return traffic.with_balanced_condition(Status(), fleet, make_snapshot(WELL), NOW).conditions


def hot(cause: Cause) -> Fleet:
    return Fleet(
        asked=1, answered=1, hotspots=(Hotspot(group="a", cause=cause, signal=1.0, median=0.1, since_s=60.0, action="steer"),)
    )


def agrees(*fleets: Fleet) -> Conditions:
    """What is said of versions once these were heard, one after another."""
    found = Status()
    for fleet in fleets:
        found = traffic.with_compatible_condition(found, fleet, make_snapshot(WELL, status=found), NOW)
    return found.conditions


def proposes(*seen: Any) -> Conditions:
    engine = make_service(engine={"speculative": {"method": "NGram"}}).spec.engine
    return traffic.with_speculating_condition(
        Status(), engine, make_snapshot(WELL), "new", fleet_of(summary(*seen)), NOW
    ).conditions


def gone_back() -> Conditions:
    note = RollbackStatus(revision="new", to="old", message="late", since=NOW)
    seen = make_snapshot(OLD)
    good = status(seen, make_desired(1, "old"), suspended=False, now=NOW)
    return rollback.with_rollback_condition(good, note, "", seen, NOW).conditions


def shut_out() -> Conditions:
    seen = make_snapshot(WELL)
    return traffic.with_exposure_condition(
        status(seen, make_desired(1), suspended=False, now=NOW), "no such kind", seen, NOW
    ).conditions


HEARD, STRANGERS = Fleet(asked=1, answered=1), Fleet(asked=1, answered=1, unknown_versions=("group a: speaks 9",))
CLAIM = held_up("Unschedulable", 'persistentvolumeclaim "models" not found')
SHORT = replace(STARTS, pods=STARTS.pods[:1], short_since=NOW)
WAITS = PlacementTurn(why="another group is placed first", left_s=1.0, told=True)
CASES: list[tuple[str, Callable[[], Conditions]]] = [
    ("Ready True Ready, Available True Serving, Progressing True Complete, RouterReady True Ready", lambda: whole(WELL)),
    ("Ready True Suspended, Available False NoReadyGroup", lambda: whole(replicas=0, suspended=True)),
    ("Ready True ScaledToZero, Available False Holding", lambda: whole(replicas=0, holds=True)),
    ("Ready False ImagePullFailed", lambda: whole(held_up("ErrImagePull"))),
    ("Ready False PodFailing", lambda: whole(held_up("CrashLoopBackOff"))),
    ("Ready False InsufficientCapacity", lambda: whole(held_up("Unschedulable"))),
    ("Ready False QuotaExceeded", lambda: whole(replace(STARTS, refused=QUOTA))),
    ("Ready False Rejected", lambda: whole(replace(STARTS, refused="a webhook says no"))),
    ("Ready False RestartBudgetSpent, Stalled True RestartBudgetSpent", lambda: whole(STARTS, spent="a died")),
    ("Ready False RollingOut, Progressing True Rolling, Reconciling True Rolling", lambda: whole(OLD)),
    ("Ready False GroupsNotReady, Progressing True Scaling, Reconciling True Scaling", lambda: whole(STARTS)),
    (
        "Ready False RouterNotReady, RouterReady False RouterNotReady, Available False RouterNotReady",
        lambda: whole(WELL, router=NO_ROUTER),
    ),
    ("Progressing True SurgeUnschedulable, Reconciling True SurgeUnschedulable", lambda: whole(OLD, no_room="none")),
    ("Progressing Unknown Paused", lambda: whole(OLD, paused=True)),
    (
        "Progressing False ProgressDeadlineExceeded, Stalled True ProgressDeadlineExceeded",
        lambda: whole(OLD, late="a is not ready"),
    ),
    ("Ready False RolledBack, Progressing False RolledBack, Stalled True RolledBack", gone_back),
    ("RouterReady False Rejected, Ready False Rejected, Stalled True Rejected", shut_out),
    ("CapacityAvailable True Scheduled", lambda: placed(WELL)),
    ("CapacityAvailable False Unschedulable", lambda: placed(held_up("Unschedulable"))),
    ("CapacityAvailable False GangWaiting", lambda: placed(held_up("SchedulingGated"))),
    ("CapacityAvailable False GangWaiting", lambda: placed(WELL, WAITS)),
    ("CapacityAvailable False QuotaExceeded", lambda: placed(replace(STARTS, refused=QUOTA))),
    ("CapacityAvailable False Rejected", lambda: placed(SHORT)),
    ("ModelCached True Cached", lambda: kept(WELL)),
    ("ModelCached Unknown Downloading", lambda: kept(STARTS)),
    ("ModelCached False AuthFailed", lambda: kept(STARTS, "pod 0: the hub refuses the token for org/x")),
    ("ModelCached False NotFound", lambda: kept(STARTS, "pod 0: there is no model org/x")),
    ("ModelCached False ClaimUnbound", lambda: kept(CLAIM)),
    ("ScalingActive True Active", lambda: scaled(fleet_of(summary(group())))),
    ("ScalingActive True External", lambda: scaled(fleet_of(summary(group())), "External")),
    ("ScalingActive True Advisory", lambda: scaled(fleet_of(summary(group())), "Advisory")),
    ("ScalingActive False MetricsUnavailable", lambda: scaled(SILENT)),
    ("ScalingActive False ConflictingScaler", lambda: scaled(fleet_of(summary(group())), writer=ReplicasWriter("hpa", NOW))),
    ("ScalingActive False Disabled", lambda: scaled(SILENT, suspend=True)),
    ("Balanced True Balanced", lambda: balances(HEARD)),
    ("Balanced Unknown RoutersSilent", lambda: balances(SILENT)),
    ("Balanced False FleetSaturated", lambda: balances(replace(HEARD, saturated=True))),
    ("Balanced False KvBound", lambda: balances(hot("kv"))),
    ("Balanced False PrefillBound", lambda: balances(hot("prefill"))),
    ("Balanced False DecodeBound", lambda: balances(hot("decode"))),
    ("Balanced False PrefixSkew", lambda: balances(hot("prefix"))),
    ("Balanced False Straggler", lambda: balances(hot("straggler"))),
    ("Balanced False ImminentFull", lambda: balances(hot("full"))),
    ("Compatible False UnknownVersion", lambda: agrees(HEARD, STRANGERS)),
    ("Compatible True VersionsAgree", lambda: agrees(STRANGERS, HEARD)),
    ("Speculating True Proposing", lambda: proposes(group("a"))),
    ("Speculating False DraftLost", lambda: proposes(group("a", draft_lost="no tensors"))),
    ("Speculating Unknown NoReadyGroup", lambda: proposes()),
]


@pytest.mark.parametrize(("told", "decide"), CASES)
def test_condition_table(told: str, decide: Callable[[], Conditions]) -> None:
    assert set(told.split(", ")) <= said(decide())


REFUSED = "Ready False {0}, Progressing False {0}, Stalled True {0}"
NO_GROUP = f"{REFUSED}, CapacityAvailable False {{0}}"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (REFUSED.format("SpecInvalid"), {"parallelism": {"tensor": 4, "gpusPerPod": 3}}, ""),
    (NO_GROUP.format("Rejected"), {}, "a webhook says no"),
    (NO_GROUP.format("QuotaExceeded"), {}, QUOTA),
]


@pytest.mark.parametrize(("told", "spec", "words"), REFUSALS)
async def test_refusal_condition_table(told: str, spec: dict[str, Any], words: str) -> None:
    """`words`: of the API server, where it takes no group."""
    world = World(**spec)
    if words:
        create = next(call for call in await World().look() if "statefulsets" in call)
        world.kube.failures[create] = Rejected(words)
    with contextlib.suppress(Rejected):
        await world.look()
    assert set(told.split(", ")) <= said(world.status.conditions)
    assert kstatus(world.service) == "Failed"


def test_kstatus_agrees_with_every_condition() -> None:
    seen: set[str] = set()
    for told, decide in CASES:
        conditions = tuple(decide())
        if not find_condition(conditions, "Ready"):
            continue  # a part of a status
        read = "Failed" if "Stalled True" in told else "Current" if "Ready True" in told.split(", ")[0] else "InProgress"
        written = Status(observed_generation=7, conditions=conditions).model_dump(by_alias=True)
        assert kstatus({"metadata": {"generation": 7}, "status": written}) == read, told
        assert kstatus({"metadata": {"generation": 8}, "status": written}) == "InProgress", "the operator has not seen the spec"
        seen.add(read)
    assert seen == {"Current", "InProgress", "Failed"}


async def test_kstatus_follows_creation_and_change_of_a_service() -> None:
    world = World()
    await world.look()
    assert kstatus(world.service) == "InProgress"
    await world.settle()
    assert kstatus(world.service) == "Current"
    changed = world.service
    world.kube.put(SERVICES_OF_OURS, changed | {"metadata": changed["metadata"] | {"generation": 2}})
    assert (kstatus(world.service), world.ready) == ("InProgress", ("True", "Ready"))
    await world.look()
    assert kstatus(world.service) == "Current"


def test_every_condition_and_reason_occurs_in_a_case() -> None:
    told = [told for told, _ in CASES] + [told for told, _, _ in REFUSALS]
    assert {one for words in told for one in words.split(", ")} == SAID
    kinds, _, reasons = zip(*(one.split() for one in SAID), strict=True)
    assert (set(kinds), set(reasons)) == (set(get_args(ConditionType)), {reason.value for reason in Reason})


GROUPS = [WELL, OLD, STARTS, SHORT, *map(held_up, ("ErrImagePull", "Error", "Unschedulable"))]
GROUPS += [replace(STARTS, refused=words) for words in (QUOTA, "no")]
FLAGS = [dict(zip(("late", "spent", "no_room"), words, strict=True)) for words in itertools.product(("", "why"), repeat=3)]


SETTINGS: list[tuple[Any, ...]] = list(itertools.product((SETTLED_ROUTER, NO_ROUTER, None), (0, 1), *[(False, True)] * 2))


@pytest.mark.parametrize("wanted", FLAGS, ids=lambda flags: ",".join(name for name, words in flags.items() if words) or "none")
def test_groups_and_routers_have_no_other_conditions(wanted: dict[str, Any]) -> None:
    """All small cases of what is there and what is wanted."""
    found: set[str] = set()
    for groups in itertools.chain([()], itertools.combinations(GROUPS, 1), itertools.combinations(GROUPS, 2)):
        for router, replicas, paused, suspended in SETTINGS:
            more = wanted | {"paused": paused, "holds": not suspended}
            found |= said(whole(*groups, replicas=replicas, suspended=suspended, router=router, **more))
    assert found <= SAID
