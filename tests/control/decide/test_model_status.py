"""`status.model`: the served version of the model's source, and the nodes with a cached copy."""

from typing import Any

import pytest

from phalanx_api.status import ModelStatus, Status
from phalanx_operator.decide.conditions import model as model_conditions
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup
from phalanx_operator.kube.client import PODS
from tests.control.builders import make_group, make_service, make_snapshot
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

LOCAL = {"uri": "hf://org/model", "cache": {"type": "NodeLocal", "size": "1Gi"}}
SHARED = {"uri": "hf://org/model", "cache": {"type": "Shared", "claimName": "models"}}


def fleet_with_versions(*groups: tuple[str, str], **fields: Any) -> Fleet:
    return fleet_of(summary(*(group(name, model_version=version, **fields) for name, version in groups)))


OLD, NEW = make_group("z", "old", created="1"), make_group("a", created="2")


@pytest.mark.parametrize(
    ("groups", "fleet", "resolved"),
    [
        ((OLD, NEW), fleet_with_versions(("z", "abc"), ("a", "def")), "def"),
        ((OLD, make_group("a", created="2", ready=False)), fleet_with_versions(("z", "abc"), ("a", "def")), "abc"),
        ((OLD, NEW), fleet_with_versions(("z", "abc")), "abc"),
        ((OLD,), fleet_with_versions(("z", "abc"), state="dead"), "former"),
        ((OLD,), fleet_with_versions(("z", "")), "former"),
        ((OLD,), Fleet(polled=1), "former"),
        ((), fleet_with_versions(), "former"),
    ],
    ids=["newest", "ready", "reported", "not linked", "leader without version", "silent routers", "no group"],
)
def test_version_is_that_of_the_newest_loaded_group(groups: tuple[ObservedGroup, ...], fleet: Fleet, resolved: str) -> None:
    model = make_service().spec.model
    former = Status(model=ModelStatus(resolved_revision="former"))
    status = model_conditions.with_model_status(Status(), model, make_snapshot(*groups, status=former), fleet)
    assert status.model == ModelStatus(resolved_revision=resolved)


def test_a_file_or_a_claim_has_no_version() -> None:
    model = make_service(model={"uri": "pvc://models/x"}).spec.model
    former = Status(model=ModelStatus(resolved_revision="former"))
    assert (
        model_conditions.with_model_status(
            Status(), model, make_snapshot(NEW, status=former), fleet_with_versions(("a", ""))
        ).model
        == ModelStatus()
    )


@pytest.mark.parametrize(("model", "nodes"), [(LOCAL, 2), (SHARED, 0), ({"uri": "hf://org/model"}, 0)])
def test_cached_nodes_are_those_of_ready_pods_with_claims(model: dict[str, Any], nodes: int) -> None:
    groups = make_group("a"), make_group("b"), make_group("c", ready=False, size=3), make_group("d", size=9, terminating=True)
    spec = make_service(model=model).spec.model
    assert model_conditions.with_model_status(Status(), spec, make_snapshot(*groups), Fleet()).model.cached_nodes == nodes


async def test_status_reports_the_version_once() -> None:
    world = World(model=LOCAL, replicas=2)
    await world.settle()
    world.cluster.start_router_pods()
    first, second = sorted(world.groups)
    world.routers.summary = summary(group(first, model_version="c0ffee"), group(second, model_version="c0ffee"))
    await world.settle()
    assert world.status.model == ModelStatus(resolved_revision="c0ffee", cached_nodes=1)
    world.routers.summary = None
    await world.settle()
    assert world.status.model.resolved_revision == "c0ffee", "silent routers change nothing"
    assert {pod["spec"].get("nodeName") for pod in world.kube.of_kind(PODS).values()} == {"node-0", None}
