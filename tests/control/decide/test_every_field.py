"""Another value of any field of a service changes a rendered object or a decision.

A new revision alone does not count, except for `rollout.restartId`. `security.tokenRotationId` changes a Secret that exists.
"""

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.crd import schema
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.status import Status
from phalanx_operator.decide import plan
from phalanx_operator.decide.groups import rollback
from phalanx_operator.decide.plan import PlanInputs
from phalanx_operator.decide.scaling import autoscaler
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState, replica_bounds
from phalanx_operator.decide.state.policy import PolicyInputs, router_policy
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedNode, RestartRecord
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.render import gangs, pods
from phalanx_operator.render.objects import group_names
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from phalanx_operator.render.services import read_tokens
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.field_cases import CHANGES, Change
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import IMAGES, World

WHOLE = {"placement.tolerations", "placement.affinity", "podTemplate", "router.podTemplate"}
"""Records that are copied into pods."""
START = datetime.datetime.fromisoformat(NOW)
MOMENTS_S = (0, 45, 200, 400, 1000, 2500, 4000)
KINDS_OF_SPEC = {"inferenceservices", "statefulsets", "events"}
"""The spec, the objects of `rendered`, and events."""
FLEET = fleet_of(summary(group("a")))


def fields(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yields the leaves of a schema, such as `a.b[0].c`."""
    items = node.get("items", {})
    if path in WHOLE or not ("properties" in node or "properties" in items):
        yield path
    elif "properties" in items:
        yield from fields(items, f"{path}[0]")
    for name, child in node.get("properties", {}).items() if path not in WHOLE else ():
        yield from fields(child, f"{path}.{name}".removeprefix("."))


def since_start(group: ObservedGroup, **pod: Any) -> ObservedGroup:
    """Returns the group with these fields of all pods, created now."""
    return replace(group, created=NOW, pods=tuple(replace(member, created=NOW, **pod) for member in group.pods))


READY = since_start(make_group("a"), ready_since=NOW)
STARTS = since_start(make_group("b", ready=False), unready_since=NOW)
OLD = make_group("c", "old", created=NOW)
SCENARIOS: dict[str, tuple[ObservedGroup, ...]] = {
    "complete": (make_group("a", created=NOW), make_group("b", created=NOW)),
    "fresh": (READY, OLD),
    "starting": (STARTS,),
    "unplaced": (OLD, make_group("d", "old", created=NOW), replace(since_start(STARTS, node=""), gang="Fallback")),
    "draining": (replace(READY, draining=DrainMark(NOW, "surplus")), make_group("e", created=NOW)),
    "restarted": (replace(STARTS, restarts=RestartRecord(at=(NOW,) * 4)),),
    "given up": (replace(STARTS, restarts=RestartRecord(at=(NOW,) * 6)),),
    "node lost": (replace(READY, pods=tuple(replace(pod, node="lost") for pod in READY.pods)),),
}
NODES = {"lost": ObservedNode("lost", ready=False, since=NOW)}


def decided(service: InferenceService) -> list[object]:
    """Returns all plans over time."""
    plans: list[object] = []
    for groups in SCENARIOS.values():
        for later_s in MOMENTS_S:
            now = (START + datetime.timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
            former = Status(current_revision="old", update_revision="new")
            snapshot = plan.assess(service, make_snapshot(*groups, nodes=NODES, status=former), FLEET, now)
            _, scaling = autoscaler.autoscale(service, snapshot, FLEET, AutoscalerState(), now, float(later_s))
            inputs = PlanInputs(
                snapshot=snapshot,
                fleet=FLEET,
                scaling=scaling,
                gang_kind="Fallback",
                rollback=rollback.due_rollback(snapshot, "new", service.spec, now),
            )
            desired = plan.desired_groups(service, "new", group_names("chat", "uid-1", "new", 9), inputs, now)
            plans.append((desired, plan.decide(service, inputs, desired, now)))
    return plans


def rules(service: InferenceService) -> object:
    scaling = service.spec.autoscaling
    return autoscaler.scaling_rules(service, scaling, replica_bounds(scaling, START)) if scaling else None


def rendered(service: InferenceService) -> object:
    """Returns a group without its revision, and its gang objects."""
    gang = gangs.choose_gang(service, {gangs.NATIVE_API, gangs.VOLCANO_API})
    return pods.group(service, "g", GroupBuild(revision="r", images=IMAGES, gang=gang)), gang.objects(
        service, "g", "uid-g", service.shape.pods
    )


async def created(spec: dict[str, Any]) -> object:
    """Returns all other objects, without the revision."""
    world = World(**spec)
    world.kube.unknown.clear()
    await world.reconcile()
    others = {where: body for where, body in world.kube.objects.items() if where[0] not in KINDS_OF_SPEC}
    return json.dumps(sorted(others.items())).replace(revision(make_service(**spec)), "r")


def policy(service: InferenceService) -> object:
    return router_policy(service.spec, PolicyInputs(routers=1, revision="new"))


async def has_effect(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Returns whether anything differs."""
    former, latter = make_service(**before), make_service(**after)
    if any(part(former) != part(latter) for part in (rendered, rules, policy, decided)):
        return True
    return await created(before) != await created(after)


async def rotated(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Returns whether a change of an existing service adds a token."""
    world = World(**before)
    await world.settle()
    former = dict(world.kube.of_kind(SECRETS))
    await world.change(**after)
    await world.settle()
    return len(read_tokens(world.kube.of_kind(SECRETS)["chat-token"])) == 2 and len(read_tokens(former["chat-token"])) == 1


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.field)
async def test_each_field_changes_an_object_or_decision(case: Change) -> None:
    if case.field == "rollout.restartId":
        assert revision(make_service(**case.before)) != revision(make_service(**case.after))
    elif case.field == "security.tokenRotationId":
        assert revision(make_service(**case.before)) == revision(make_service(**case.after))
        assert await rotated(case.before, case.after)
    else:
        assert await has_effect(case.before, case.after)


@pytest.mark.parametrize("field", ["replicas", "model.cache.type", "autoscaling.schedules[0].cron", "router.expose.hosts"])
async def test_the_same_values_change_nothing(field: str) -> None:
    (case,) = [case for case in CHANGES if case.field == field]
    assert not await has_effect(case.before, case.before) and not await has_effect(case.after, case.after)


def test_every_field_of_a_service_has_a_case() -> None:
    assert sorted(case.field for case in CHANGES) == sorted(fields(schema()["properties"]["spec"]))
