"""HTTPS for clients: pods, Services, routes and monitoring, from the spec and from what routers serve; the condition."""

import base64
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from phalanx_api import labels
from phalanx_api.conditions import Reason, find_condition
from phalanx_operator.decide.state.snapshot import ObservedPod, router_schemes
from phalanx_operator.kube.client import DEPLOYMENTS, INGRESSES, SECRETS, SERVICES, Retry
from phalanx_operator.observe.certificate import judge
from phalanx_operator.render import monitoring, network, router
from phalanx_operator.render.revision import revision
from tests.certificates import issue
from tests.control.builders import NOW, make_service
from tests.control.conftest import Check
from tests.control.render.documents import IMAGES, as_yaml
from tests.control.worlds import World

TLS: dict[str, Any] = {"tls": {"secretName": "chat-cert"}}
INGRESS: dict[str, Any] = {"expose": {"type": "Ingress", "annotations": {"a": "b"}}}
BACKEND = "nginx.ingress.kubernetes.io/backend-protocol"
GOOD, OTHER = issue("chat.example"), issue("chat.example")
WEAK = issue("authority", key=rsa.generate_private_key(65537, 1024))
HTTPS = {labels.SCHEME: "https"}


def test_golden_routers_with_tls(golden: Check) -> None:
    service = make_service(router=TLS | INGRESS)
    exposed = [body for body, is_specified in network.exposures(service) if is_specified]
    golden("objects/router-tls.yaml", as_yaml(*router.router_objects(service, IMAGES), *exposed, monitoring.objects(service)[0]))


def test_certificate_restarts_routers_only() -> None:
    plain, secured = make_service(), make_service(router=TLS)
    assert revision(plain) == revision(secured)
    former, latter = (router.router_objects(service, IMAGES)[-1]["spec"] for service in (plain, secured))
    assert former["selector"] == latter["selector"] and former["template"] != latter["template"]


def test_own_annotation_of_the_ingress_wins() -> None:
    expose = {"type": "Ingress", "annotations": {BACKEND: "GRPCS"}}
    (ingress, _), _ = network.exposures(make_service(router=TLS | {"expose": expose}))
    assert ingress["metadata"]["annotations"] == {BACKEND: "GRPCS"}


@pytest.mark.parametrize("wants_https", [False, True])
@pytest.mark.parametrize(
    ("ready", "keeps_former"),
    [((), False), (("wanted",), False), (("former",), True), (("former", "wanted"), False)],
    ids=str,
)
def test_scheme_changes_once_a_router_serves_it(wants_https: bool, ready: tuple[str, ...], keeps_former: bool) -> None:
    served = [wants_https if each == "wanted" else not wants_https for each in ready]
    pods = [ObservedPod(name="", index=0, owner_uid="", ready=True, is_https=is_https) for is_https in served]
    pods.append(ObservedPod(name="", index=0, owner_uid="", ready=False, is_https=not wants_https))
    schemes = router_schemes(pods, wants_https=wants_https)
    assert schemes.is_https == (wants_https != keeps_former)
    other = "former" in ready
    assert (schemes.has_https, schemes.has_http) == ((True, other) if wants_https else (other, True))


@pytest.mark.parametrize(("state", "is_https"), [("ready", True), ("unreported", False)])
def test_scheme_of_routers_on_silent_nodes_stays(state: str, is_https: bool) -> None:
    """Until another router is ready: they may still serve, and their Service publishes them."""
    former = ObservedPod(name="", index=0, owner_uid="", is_unreported=True)
    latter = ObservedPod(name="", index=0, owner_uid="", is_https=True, ready=state == "ready")
    schemes = router_schemes((pod for pod in (former, latter)), wants_https=True)
    assert (schemes.is_https, schemes.has_http, schemes.has_https) == (is_https, not is_https, True)


def ports(world: World) -> dict[int, Any]:
    return {port["port"]: port["targetPort"] for port in world.kube.of_kind(SERVICES)["chat"]["spec"]["ports"]}


def backend(world: World) -> int:
    (rule,) = world.kube.of_kind(INGRESSES)["chat"]["spec"]["rules"]
    return int(rule["http"]["paths"][0]["backend"]["service"]["port"]["number"])


async def test_both_schemes_are_served_while_routers_restart() -> None:
    world = World(router=INGRESS)
    world.kube.put(SECRETS, {"metadata": {"name": "chat-cert", "namespace": "team"}, "data": GOOD.secret_data})
    world.cluster.start_router_pods(2)
    await world.settle()
    assert (ports(world), backend(world), world.status.url) == ({80: 8000}, 80, "http://chat.team.svc")
    await world.change(router=TLS | INGRESS)
    await world.settle()
    assert (ports(world), backend(world), world.status.url) == ({80: "http", 443: "https"}, 80, "http://chat.team.svc")
    world.cluster.start_router_pods(1, HTTPS)  # replaces one of two
    await world.settle()
    assert (ports(world), backend(world), world.status.url) == ({80: "http", 443: "https"}, 443, "https://chat.team.svc")
    assert {target.uid: target.is_https for target in world.routers.targets} == {"router-0": True, "router-1": False}
    world.cluster.start_router_pods(2, HTTPS)
    await world.settle()
    assert (ports(world), backend(world)) == ({443: "https"}, 443)
    await world.change(router=INGRESS)
    await world.settle()
    assert (ports(world), world.status.url) == ({80: "http", 443: "https"}, "https://chat.team.svc"), "HTTPS routers still serve"
    world.cluster.start_router_pods(2)
    await world.settle()
    assert (ports(world), backend(world), world.status.url) == ({80: 8000}, 80, "http://chat.team.svc")


BROKEN: dict[str, tuple[Mapping[str, str] | None, Reason, str]] = {
    "no Secret": (None, Reason.NOT_FOUND, "there is no Secret a"),
    "no key": ({"tls.crt": GOOD.secret_data["tls.crt"]}, Reason.INVALID_CERTIFICATE, "the Secret a has no tls.key"),
    "empty": ({}, Reason.INVALID_CERTIFICATE, "the Secret a has no tls.crt and no tls.key"),
    "not base64": (GOOD.secret_data | {"tls.crt": "?"}, Reason.INVALID_CERTIFICATE, "tls.crt of the Secret a is no certificate"),
    "text": (GOOD.secret_data | {"tls.crt": "YQ=="}, Reason.INVALID_CERTIFICATE, "tls.crt of the Secret a is no certificate"),
    "not a key": (
        GOOD.secret_data | {"tls.key": "YQ=="},
        Reason.INVALID_CERTIFICATE,
        "tls.key of the Secret a is not a key without a password",
    ),
    "another key": (
        GOOD.secret_data | {"tls.key": OTHER.secret_data["tls.key"]},
        Reason.INVALID_CERTIFICATE,
        "tls.key of the Secret a is not the key of the certificate",
    ),
    "weak curve": (
        issue("a", key=ec.generate_private_key(ec.SECP192R1())).secret_data,
        Reason.INVALID_CERTIFICATE,
        "the certificate in the Secret a cannot be served: EE_KEY_TOO_SMALL",
    ),
    "weak intermediate": (
        GOOD.secret_data | {"tls.crt": base64.b64encode((GOOD.certificate + WEAK.certificate).encode()).decode()},
        Reason.INVALID_CERTIFICATE,
        "the certificate in the Secret a cannot be served: CA_KEY_TOO_SMALL",
    ),
    "early": (
        issue("a", starts_at=f"{int(NOW[:4]) + 1}{NOW[4:]}").secret_data,
        Reason.INVALID_CERTIFICATE,
        f"the certificate in the Secret a is not valid before {int(NOW[:4]) + 1}{NOW[4:]}",
    ),
    "expired": (issue("a", ends_at=NOW).secret_data, Reason.EXPIRED, f"the certificate in the Secret a expired at {NOW}"),
}


@pytest.mark.parametrize(("data", "reason", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_secret_has_a_reason(data: Mapping[str, str] | None, reason: Reason, message: str) -> None:
    found = judge("a", data, NOW)
    assert (found.reason, found.message) == (reason, message)


def certificate_condition(world: World) -> tuple[str, str, str] | None:
    found = find_condition(world.status.conditions, "CertificateValid")
    return (found.status, found.reason, found.message) if found else None


async def test_condition_follows_the_secret() -> None:
    world = World(router=TLS)
    await world.settle()
    assert certificate_condition(world) == (
        "False",
        "NotFound",
        "spec.router.tls.secretName: there is no Secret chat-cert",
    )
    assert world.next_s is not None and world.next_s <= 60, "nothing wakes the service when the Secret appears"
    assert world.kube.of_kind(DEPLOYMENTS)["chat-router"], "its pods wait for the Secret"
    world.kube.put(SECRETS, {"metadata": {"name": "chat-cert", "namespace": "team"}, "data": GOOD.secret_data})
    world.clock += 60
    await world.settle()
    assert (certificate_condition(world) or ())[:2] == ("True", "Valid")
    world.kube.failures["get secrets chat-cert"] = Retry("busy")
    world.clock += 60
    await world.settle()
    assert (certificate_condition(world) or ())[:2] == ("True", "Valid"), "a failed read changes nothing"
    await world.change(router={"replicas": 1})
    await world.settle()
    assert certificate_condition(world) is None


async def test_new_condition_is_an_event() -> None:
    world = World(router=TLS)
    await world.settle()
    assert ("Warning", "NotFound") in world.events()
