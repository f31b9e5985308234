"""What a service with internal TLS answers to others: every port of every pod, from a pod of another namespace."""

from collections.abc import Iterator

import pytest

from phalanx_api import labels
from tests.cluster import probing, tiny_model
from tests.cluster import service as svc
from tests.cluster.conftest import make_namespace
from tests.cluster.fixtures import Cluster
from tests.cluster.scenes import Scene

pytestmark = pytest.mark.cluster
OWN, OTHER_ROUTER, OTHER_GROUP = "own", "other-router-tls", "other-group-tls"
"""Secrets of the prober: a copy of the service's own router's, to see that the prober works, and those of another service."""


@pytest.fixture
def stranger(cluster: Cluster, scene: Scene) -> Iterator[Scene]:
    """A namespace with another service that has certificates and no groups."""
    other = Scene(cluster, make_namespace(cluster, "stranger"))
    cluster.claim(other.namespace, "models", tiny_model.folder())
    other.apply(other.manifest(replicas=0, name="other", security={"tls": "Internal"}))
    yield other
    other.delete_service("other")
    cluster.kubectl("delete", "namespace", other.namespace, "--wait=false")


def has_secrets(scene: Scene, names: set[str]) -> bool:
    return names <= {each["metadata"]["name"] for each in scene.get("secrets")["items"]}


def start_prober(scene: Scene, stranger: Scene) -> None:
    svc.wait_for(lambda: has_secrets(stranger, {OTHER_ROUTER, OTHER_GROUP}), 120, "the other service has certificates")
    own = scene.get("secret", "chat-router-tls")
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": OWN}, "type": own["type"], "data": own["data"]}
    stranger.apply(body)
    probing.start(scene.cluster, stranger.namespace, [OWN, OTHER_ROUTER, OTHER_GROUP])


def ports_by_pod(scene: Scene) -> dict[str, set[int]]:
    """Returns the declared ports and those on which processes listen."""
    pods = scene.pods("phalanx.dev/service=chat")
    listening = {name: probing.listeners(scene.cluster, scene.namespace, name) for name in pods}
    return {name: probing.declared(pod) | listening[name] for name, pod in pods.items()}


def test_no_port_answers_without_the_certificate_of_the_service(scene: Scene, stranger: Scene) -> None:
    """Probes of kubelets and the clients' port of routers are the exceptions."""
    scene.apply(scene.manifest(replicas=1, pods=2, security={"tls": "Internal"}))
    scene.wait_ready(1, 500)
    start_prober(scene, stranger)
    pods, ports = scene.pods("phalanx.dev/service=chat"), ports_by_pod(scene)
    components = {pod["status"]["podIP"]: pod["metadata"]["labels"][labels.COMPONENT] for pod in pods.values()}
    targets = [(pod["status"]["podIP"], port) for name, pod in pods.items() for port in sorted(ports[name])]
    assert all(ports.values()), ports
    answers = probing.probe(scene.cluster, stranger.namespace, targets)
    own = {(components[each.host], each.port) for each in answers if each.way == OWN}
    assert {("group", labels.HTTP_PORT), ("router", labels.INTERNAL_PORT)} <= own, "the prober reaches the ports"
    strange = [each for each in answers if each.way != OWN]
    assert {(components[each.host], each.port) for each in strange} == {
        ("group", labels.HEALTH_PORT),
        ("router", labels.HTTP_PORT),
    }, strange
    probes = {each.path: each.status for each in strange if each.port == labels.HEALTH_PORT}
    assert {path for path, status in probes.items() if status == "200"} == {"/healthz", "/readyz"}
    assert {status for path, status in probes.items() if path not in ("/healthz", "/readyz")} <= {"404", "400"}
    scene.delete_service()
