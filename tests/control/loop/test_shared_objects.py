"""Objects that all groups of a service share: applied, restored, and never taken from another owner."""

import base64
import datetime

import pytest
from cryptography import x509

from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.service_tokens import read_state
from phalanx_operator.apply.shared_objects import PUBLISHED_S
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    SECRETS,
    SERVICES,
    Rejected,
    Resource,
    Retry,
)
from tests.control.builders import NOW, make_body
from tests.control.loop.scenes import LONG_AGO, world_with_routers
from tests.control.worlds import World


@pytest.mark.parametrize(
    ("resource", "name"), [(SERVICES, "chat"), (SERVICES, "chat-groups"), (DEPLOYMENTS, "chat-router")], ids=lambda v: str(v)
)
async def test_deleted_shared_object_is_created_again(resource: Resource, name: str) -> None:
    world = World()
    await world.settle()
    del world.kube.objects[resource.plural, "team", name]
    assert f"apply {resource.plural} {name}" in await world.reconcile()


async def test_service_publishes_routers_on_silent_nodes() -> None:
    """Until one has been ready for a while: Kubernetes would send them no new connections."""
    world = await world_with_routers(replicas=1)
    pod = world.kube.of_kind(PODS)["chat-router-0"]
    world.kube.put(PODS, pod | {"spec": {"nodeName": "far"}})
    await world.settle()
    assert "publishNotReadyAddresses" not in world.kube.of_kind(SERVICES)["chat"]["spec"]
    routers = world.kube.of_kind(DEPLOYMENTS)["chat-router"]
    world.kube.put(DEPLOYMENTS, routers | {"status": routers["status"] | {"readyReplicas": 0}})
    assert "apply services chat" not in await world.reconcile(), "its Deployment reports the ready router late"
    world.cluster.lose_node("far", LONG_AGO)
    assert "apply services chat" in await world.reconcile()
    assert world.kube.of_kind(SERVICES)["chat"]["spec"]["publishNotReadyAddresses"] is True
    world.cluster.start_router_pods()
    await world.reconcile()
    assert world.kube.of_kind(SERVICES)["chat"]["spec"]["publishNotReadyAddresses"] is True, "it may be unready again"
    assert world.next_s is not None and 0 < world.next_s <= PUBLISHED_S
    world.clock += PUBLISHED_S
    assert "apply services chat" in await world.reconcile()
    assert "publishNotReadyAddresses" not in world.kube.of_kind(SERVICES)["chat"]["spec"]


async def test_shared_children_are_applied_again_after_ten_minutes() -> None:
    world = World()
    await world.settle()
    world.clock = REAPPLY_S + 1
    writes = await world.reconcile()
    assert "apply deployments chat-router" in writes
    assert not any("secrets" in write or "statefulsets" in write for write in writes)


async def test_only_the_router_changes_with_its_replicas() -> None:
    world = World()
    await world.settle()
    await world.change(router={"replicas": 3})
    assert [w for w in await world.reconcile() if "status" not in w and "events" not in w] == [
        "apply configmaps chat-policy",
        "apply deployments chat-router",
    ]


async def test_name_taken_by_a_foreign_object_is_reported() -> None:
    world = World()
    world.kube.put(SERVICES, {"metadata": {"name": "chat", "namespace": "team", "uid": "foreign"}})
    with pytest.raises(Rejected, match="Service chat exists and the operator does not own it"):
        await world.reconcile()
    assert world.ready == ("False", "Rejected")
    assert world.groups == set()


async def test_objects_of_a_former_service_are_awaited() -> None:
    world = World()
    owner = {"name": "chat", "uid": "former", "controller": True}
    world.kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team", "ownerReferences": [owner]}})
    with pytest.raises(Retry, match="earlier service"):
        await world.reconcile()
    del world.kube.objects["secrets", "team", "chat-token"]
    await world.settle()
    assert world.ready == ("True", "Ready")


async def test_certificates_and_rotations_follow_the_api_server() -> None:
    """The clock of the operator's node is months ahead here: its certificates would not be valid yet."""
    world, now = World(security={"tls": "Internal"}), datetime.datetime.fromisoformat(NOW)
    await world.settle()
    leaf = x509.load_pem_x509_certificate(base64.b64decode(world.kube.of_kind(SECRETS)["chat-router-tls"]["data"]["tls.crt"]))
    assert leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc
    await world.change(security={"tls": "Internal", "tokenRotationId": "1"})
    world.clock += REAPPLY_S
    await world.reconcile()
    assert read_state(world.kube.of_kind(SECRETS)["chat-token"]).since == now


async def test_groups_of_a_former_service_do_not_count() -> None:
    world = World()
    await world.settle()
    other = World(world.kube)
    body = make_body(uid="uid-2")
    world.kube.put(INFERENCE_SERVICES, body)
    for where in [where for where in world.kube.objects if where[0] not in ("statefulsets", "pods", "inferenceservices")]:
        del world.kube.objects[where]
    await other.reconcile()
    assert other.status.replicas == 0
    assert len(other.groups) == 2
