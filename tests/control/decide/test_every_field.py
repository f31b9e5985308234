"""No field of a service does nothing: another value changes what is rendered or decided, and every field has its turn.

That the revision changes does not count: it would replace every group for nothing. `rollout.restartId` is for just that.
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
from phalanx_operator.decide.scaling.autoscaler import AutoscalerState, bounds
from phalanx_operator.decide.state.policy import policy_of
from phalanx_operator.decide.state.snapshot import DrainMark, ObservedGroup, ObservedNode, Restarts
from phalanx_operator.render import gangs, pods
from phalanx_operator.render.objects import group_names
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.field_cases import CHANGES, Change
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import IMAGES, World

WHOLE = {"placement.tolerations", "placement.affinity", "podTemplate"}
"""Records that are laid into pods as they are."""
START = datetime.datetime.fromisoformat(NOW)
MOMENTS_S = (0, 45, 200, 400, 1000, 2500, 4000)
KINDS_OF_SPEC = {"inferenceservices", "statefulsets", "events"}
"""The spec itself, what `rendered` gives, and words."""
FLEET = fleet_of(summary(group("a")))


def fields(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field of a schema that has none in it: `a.b[0].c`."""
    items = node.get("items", {})
    if path in WHOLE or not ("properties" in node or "properties" in items):
        yield path
    elif "properties" in items:
        yield from fields(items, f"{path}[0]")
    for name, child in node.get("properties", {}).items() if path not in WHOLE else ():
        yield from fields(child, f"{path}.{name}".removeprefix("."))


def since_start(group: ObservedGroup, **pod: Any) -> ObservedGroup:
    """All of its pods have been so since the first moment."""
    return replace(group, created=NOW, pods=tuple(replace(one, created=NOW, **pod) for one in group.pods))


READY = since_start(make_group("a"), ready_since=NOW)
STARTS = since_start(make_group("b", ready=False), unready_since=NOW)
OLD = make_group("c", "old", created=NOW)
SCENES: dict[str, tuple[ObservedGroup, ...]] = {
    "whole": (make_group("a", created=NOW), make_group("b", created=NOW)),
    "fresh": (READY, OLD),
    "starting": (STARTS,),
    "unplaced": (OLD, make_group("d", "old", created=NOW), replace(since_start(STARTS, node=""), gang="Fallback")),
    "leaving": (replace(READY, draining=DrainMark(NOW, "surplus")), make_group("e", created=NOW)),
    "restarted": (replace(STARTS, restarts=Restarts(at=(NOW,) * 4)),),
    "given up": (replace(STARTS, restarts=Restarts(at=(NOW,) * 6)),),
    "node lost": (replace(READY, pods=tuple(replace(pod, node="gone") for pod in READY.pods)),),
}
NODES = {"gone": ObservedNode("gone", ready=False, since=NOW)}


def decided(service: InferenceService) -> list[object]:
    """What is to be done and said in each scene as time goes by."""
    found: list[object] = []
    for groups in SCENES.values():
        for later_s in MOMENTS_S:
            now = (START + datetime.timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
            former = Status(current_revision="old", update_revision="new")
            snapshot = plan.assessed(service, make_snapshot(*groups, nodes=NODES, status=former), FLEET, now)
            _, scaling = autoscaler.scaling(service, snapshot, FLEET, AutoscalerState(), now, float(later_s))
            seen = PlanInputs(
                snapshot=snapshot,
                fleet=FLEET,
                scaling=scaling,
                gang="Fallback",
                back=rollback.given_up(snapshot, "new", service.spec, now),
            )
            desired = plan.desired_groups(service, "new", group_names("chat", "uid-1", "new", 9), seen, now)
            found.append((desired, plan.decide(service, seen, desired, now)))
    return found


def rules(service: InferenceService) -> object:
    policy = service.spec.autoscaling
    return autoscaler.rules_of(service, policy, bounds(policy, START)) if policy else None


def rendered(service: InferenceService) -> object:
    """A group, of whatever revision, and what stands beside it."""
    gang = gangs.chosen(service, {gangs.NATIVE_API, gangs.VOLCANO_API})
    return pods.group(service, "g", GroupBuild(revision="r", images=IMAGES, gang=gang)), gang.objects(
        service, "g", "uid-g", service.shape.pods
    )


async def made(spec: dict[str, Any]) -> object:
    """All other objects that the operator makes for such a service, of whatever revision."""
    world = World(**spec)
    world.kube.unknown.clear()
    await world.look()
    others = {where: body for where, body in world.kube.objects.items() if where[0] not in KINDS_OF_SPEC}
    return json.dumps(sorted(others.items())).replace(revision(make_service(**spec)), "r")


def granted(service: InferenceService) -> object:
    return policy_of(service.spec, 1, revision="new")


async def is_felt(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether anything is done otherwise."""
    former, latter = make_service(**before), make_service(**after)
    if any(part(former) != part(latter) for part in (rendered, rules, granted, decided)):
        return True
    return await made(before) != await made(after)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.field)
async def test_each_field_changes_an_object_or_decision(case: Change) -> None:
    if case.field == "rollout.restartId":
        assert revision(make_service(**case.before)) != revision(make_service(**case.after))
    else:
        assert await is_felt(case.before, case.after)


@pytest.mark.parametrize("field", ["replicas", "model.cache.type", "autoscaling.schedules[0].cron", "router.expose.hosts"])
async def test_the_same_values_change_nothing(field: str) -> None:
    (case,) = [case for case in CHANGES if case.field == field]
    assert not await is_felt(case.before, case.before) and not await is_felt(case.after, case.after)


def test_every_field_of_a_service_has_its_turn() -> None:
    assert sorted(case.field for case in CHANGES) == sorted(fields(schema()["properties"]["spec"]))
