"""The end of a world: all faults end, the operator has time, and then everything must be as specified.

`END_INVARIANTS` are pure functions like those of `invariants`, over the end of each service.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from phalanx_api.conditions import find_condition
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.inference_service import parse as parse_service
from phalanx_api.status import Status
from phalanx_operator.decide.state.actions import (
    CreateGroup,
    DeleteGroup,
    DrainGroup,
    KeepGroup,
    RestartGroup,
    SetReplicas,
)
from phalanx_operator.kube.store import Key
from phalanx_operator.render.revision import revision
from tests.control.kstatus import kstatus
from tests.control.search.api_server import WATCHED, CallFaults, stamp
from tests.control.search.cluster import EXIT_S, REPORT_S
from tests.control.search.history import End, Look, Scaled, actions_of
from tests.control.search.scaling_invariants import fits, group_bounds
from tests.control.search.world import NOTE, VALID, SearchWorld, Violated
from tests.control.simulated_service import rate_for

ROUND_S, ROUNDS = 100.0, 150
QUIET_S = 300.0
DELETION_S = 900.0
MAX_CHANGES = 3
"""Drains and keeps of one group after the last fault, beside those by changes of the number of groups."""
MAX_REVERSALS = 2
"""Changes of the direction in which a service is scaled, after the last fault under an equal load."""
MAX_LOOKS, MAX_SECONDS = 1500, 5 * 3600.0


def no_flip_flop(looks: Sequence[Look], scaled: Sequence[Scaled] = ()) -> Iterator[str]:
    """After the last fault no group of a service is drained and kept in turns, groups are not created and deleted in a loop, and
    the service is not scaled out and in in turns, by the operator or by the HPA that follows it."""
    calm = [look for look in looks if look.is_calm and look.plan]
    steps = [
        a.replicas > (look.plan.service.spec.replicas or 0) for look in calm if look.plan for a in actions_of(look, SetReplicas)
    ]
    steps += [count.after > count.before for count in scaled]
    if (reversals := sum(step != former for former, step in pairwise(steps))) > MAX_REVERSALS:
        yield f"the autoscaler changes its direction {reversals} times"
    changes = Counter(a.uid for look in calm for a in actions_of(look, DrainGroup, KeepGroup, RestartGroup) if not look.error)
    most = MAX_CHANGES + len(steps)  # schedules go on in calm times
    yield from (f"{uid} changes {count} times" for uid, count in changes.items() if count > most)
    reasons = Counter(
        action.why.split(";")[0].rpartition("for the")[0] or type(action).__name__
        for look in calm
        for action in actions_of(look, DeleteGroup)
        if not look.error
    )
    created = sum(isinstance(action, CreateGroup) for look in calm if not look.error for action in actions_of(look, CreateGroup))
    most = max((look.plan.service.spec.replicas or 0 for look in calm if look.plan), default=0)
    if created > 4 * (most + 2) or any(count > 5 * (most + 2) for count in reasons.values()):
        yield f"{created} groups are created, and {dict(reasons)} deleted"


def converges(end: End) -> Iterator[str]:
    """After the last fault the service serves as specified, within bounded looks and time, and then nothing is written."""
    live = [group for group in end.truth.values() if group.is_live and not group.is_draining]
    if len(end.truth) != len(live) or len(live) != end.spec_replicas or not all(group.is_serving for group in live):
        yield f"{len(live)} of {end.spec_replicas} groups serve, {len(end.truth)} exist: {dict(end.truth)}"
    old = sum(group.revision not in end.revisions for group in live)
    if old > end.max_old:
        yield f"{old} groups are of another revision than {sorted(end.revisions)}"
    if not end.is_quiet:
        yield f"still writing after {end.looks} looks"
    if end.looks > MAX_LOOKS or end.seconds > MAX_SECONDS:
        yield f"{end.looks} looks in {end.seconds:.0f} s"


def status_converges(end: End) -> Iterator[str]:
    """The last status is of the last spec, and says that it is fulfilled, or that it is rolled back."""
    status = Status.model_validate(end.service.get("status", {}))
    ready = find_condition(status.conditions, "Ready")
    if status.observed_generation != end.service["metadata"]["generation"]:
        yield "the status is of an earlier spec"
    if ready is None or not (ready.status == "True" or ready.reason == "RolledBack"):
        yield f"Ready is {ready and (ready.status, ready.reason, ready.message)}"
    if kstatus(end.service) not in ("Current", "Failed") or (kstatus(end.service) == "Failed") != bool(status.rollback):
        yield f"kstatus is {kstatus(end.service)}"


def scaling_carries_the_load(end: End) -> Iterator[str]:
    """An autoscaled service ends within its bounds, with a group for each whole group's worth of work."""
    if (policy := end.autoscaling) is None:
        return
    if not fits(end.spec_replicas, policy, end.now):
        yield f"{end.spec_replicas} groups, outside of the bounds"
    if end.spec_replicas < min(math.floor(end.load), group_bounds(policy, end.now)[1]):
        yield f"{end.spec_replicas} groups for {end.load:.1f} groups' worth of work"


def applied_fields_hold(end: End) -> Iterator[str]:
    """Fields that the operator applies have its values, also after another client wrote them; fields of other clients stay."""
    yield from end.foreign


def nothing_is_left_over(end: End) -> Iterator[str]:
    """Shared objects of the service exist, no objects of former ones, and no unready routers in the Service."""
    name = end.key[1]
    missing = {f"deployments {name}-router", f"services {name}", f"services {name}-groups", f"secrets {name}-token"} - end.shared
    yield from (f"{name} is missing" for name in sorted(missing))
    yield from (f"{name} is left over" for name in end.orphans)
    if end.publishes_unready:
        yield f"services {name} publishes unready routers"


EndInvariant = Callable[[End], Iterator[str]]
END_INVARIANTS: tuple[EndInvariant, ...] = (
    converges,
    status_converges,
    scaling_carries_the_load,
    applied_fields_hold,
    nothing_is_left_over,
)


def finish(world: SearchWorld) -> None:
    """Ends all faults, gives the operator time, and checks the end of each service. Raises Violated."""
    _heal(world)
    for key in world.keys:
        _await_service(world, key)
    world.is_calm = True
    first, began = len(world.looks), world.t
    found: list[str] = []
    for _ in range(ROUNDS):
        world.wait(ROUND_S)
        ends = [_end(world, key, first, began) for key in world.keys]
        found = [
            f"{check.__name__}: {message} ({end.key[1]})" for end in ends for check in END_INVARIANTS for message in check(end)
        ]
        if not found:
            break
    for key in world.keys:
        looks = [look for look in world.looks[first:] if look.key == key]
        scaled = [count for count in world.scaled if count.key == key and count.at >= began]
        found += [f"no_flip_flop: {message}" for message in no_flip_flop(looks, scaled)]
    if found:
        raise Violated("; ".join(found))


def _heal(world: SearchWorld) -> None:
    del world.operators[:-1]
    operator = world.operators[0]
    operator.faults, operator.skew = CallFaults(), 0.0
    for resource in WATCHED:
        world.relist(operator, resource)
    world.cluster.is_controller_late, world.cluster.report_s, world.cluster.exit_s = False, REPORT_S, EXIT_S
    world.cluster.failing.clear()
    for name, machine in world.cluster.machines.items():
        world.cluster.set_node(name, "up")
        machine.is_stuck = machine.is_refusing = False
        if machine.cordoned:
            world.cluster.cordon(name, is_cordoned=False)
    world.fleet.is_pinned = False
    for router in world.fleet.routers.values():
        router.mode = "reports"
        router.unlinked.clear()


def _await_service(world: SearchWorld, key: Key) -> None:
    """A deleted service ends, and a valid one follows."""
    service = world.service(key)
    if service is not None and "deletionTimestamp" in service["metadata"]:
        world.wait(DELETION_S, until=lambda: world.service(key) is None)
        if world.service(key) is not None:
            raise Violated(f"deletion_ends: the service exists {DELETION_S:.0f} s after its deletion")
    world.create_service(world.spec, key)
    world.change_spec(key, **VALID, suspend=False, rollout={"paused": False})


def _end(world: SearchWorld, key: Key, first: int, began: float) -> End:
    service = world.service(key)
    assert service is not None
    parsed, current = _parse(msgspec.json.encode({"metadata": service["metadata"], "spec": service["spec"]}))
    rollback = Status.model_validate(service.get("status", {})).rollback
    uids = {body["metadata"]["uid"] for body in world.api.objects.values()}
    quiet = [look for look in world.looks if look.key == key and look.at >= world.t - QUIET_S]
    client = world.api.objects.get(("services", *key))
    return End(
        key=key,
        now=stamp(world.t),
        spec_replicas=service["spec"]["replicas"],
        autoscaling=parsed.spec.autoscaling,
        load=world.fleet.load.get(key[1], 0.0) / rate_for(1.0),
        revisions=frozenset({rollback.to if rollback else current}),
        max_old=0 if rollback else parsed.spec.rollout.partition,
        truth=world.truth(key),
        service=service,
        looks=sum(look.key == key for look in world.looks[first:]),
        seconds=world.t - began,
        is_quiet=not any(write.call.plural in _OWN for look in quiet for write in look.done),
        shared=frozenset(f"{plural} {name}" for plural, _, name in world.api.objects),
        foreign=(*world.api.overridden(), *_lost_notes(world)),
        publishes_unready=bool(client and client["spec"].get("publishNotReadyAddresses")),
        orphans=tuple(
            f"{plural} {name}"
            for (plural, _, name), body in world.api.objects.items()
            if (owners := body["metadata"].get("ownerReferences")) and not {o["uid"] for o in owners} & uids
        ),
    )


@lru_cache(maxsize=16)
def _parse(manifest: bytes) -> tuple[InferenceService, str]:
    """Returns a service, which rarely changes between two rounds, and its revision."""
    parsed = parse_service(msgspec.json.decode(manifest))
    assert isinstance(parsed, InferenceService), parsed
    return parsed, revision(parsed)


def _lost_notes(world: SearchWorld) -> list[str]:
    """Returns the objects that lost another client's annotation."""
    present = {(plural, name, body["metadata"]["uid"]): body for (plural, _, name), body in world.api.objects.items()}
    bodies = [(identity, present[identity]) for identity in sorted(world.notes) if identity in present]
    return [f"the annotation of {i[0]} {i[1]}" for i, b in bodies if NOTE not in (b["metadata"].get("annotations") or {})]


_OWN = ("statefulsets", "pods", "inferenceservices/status", "inferenceservices/scale")
"""Kinds that are written only for a reason; shared objects are applied again at times."""
