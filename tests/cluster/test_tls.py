"""HTTPS for clients and mutual TLS within a service: real kubelets update mounts and probe, real nodes connect."""

import base64
import json
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import httpx
import pytest

from phalanx_api import labels
from phalanx_operator.apply import issuing
from phalanx_operator.apply.certificates import ROLES
from tests.certificates import Issued, issue, served_certificate
from tests.cluster import service as svc
from tests.cluster.clients import Streams
from tests.cluster.scenes import Scene

pytestmark = pytest.mark.cluster
SECRET = "chat-cert"
NAME = "chat.example"
TOKENS = 1500


def write_certificate(scene: Scene, issued: Issued) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "kubernetes.io/tls"}
    scene.apply(body | {"data": issued.secret_data})


@pytest.fixture
def plain(scene: Scene) -> Iterator[Scene]:
    """A service with one group of one pod, without TLS."""
    scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    yield scene
    scene.delete_service()


def address(scene: Scene) -> str:
    return scene.url.removeprefix("http://")


def verifying(scene: Scene, issued: Issued) -> httpx.Client:
    context = ssl.create_default_context(cadata=issued.certificate)
    limits = httpx.Limits(keepalive_expiry=None)  # an idle connection stays in use
    return httpx.Client(base_url=f"https://{address(scene)}", verify=context, timeout=120, trust_env=False, limits=limits)


def sync_mounts(scene: Scene, component: str = "router") -> None:
    """A changed annotation makes kubelets look at their pods now, and not within a minute."""
    note = f"example.com/sync={time.time()}"
    scene.kubectl("annotate", "pods", "-l", f"phalanx.dev/component={component}", note, "--overwrite")


@pytest.mark.slow
def test_renewed_certificate_interrupts_no_stream(plain: Scene) -> None:
    scene, first, second = plain, issue(NAME), issue(NAME)
    groups = scene.uids()
    scene.patch({"router": {"tls": {"secretName": SECRET}}})
    svc.wait_for(lambda: scene.condition("CertificateValid") == ("False", "NotFound"), 120, "the missing Secret is reported")
    assert httpx.get(f"{scene.url}/healthz", timeout=10).status_code == 200, "the former router serves until the Secret exists"
    write_certificate(scene, first)
    svc.wait_for(lambda: str(scene.status().get("url", "")).startswith("https:"), 240, "a router serves HTTPS")
    svc.wait_for(lambda: scene.condition("CertificateValid") == ("True", "Valid"), 120, "the certificate is valid")
    svc.wait_for(lambda: scene.condition("RouterReady")[0] == "True", 120, "probes by HTTPS")
    assert scene.uids() == groups, "groups keep running"
    sni = {"sni_hostname": NAME}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with verifying(scene, first) as http:
        with http.stream("POST", "/v1/completions", json=body, extensions=sni) as answer:
            lines = answer.iter_lines()
            next(lines)
            write_certificate(scene, second)
            sync_mounts(scene)
            received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]" and len(received) > 1

        def is_renewed() -> bool:
            assert http.get("/healthz", extensions=sni).status_code == 200, "the former connection is open"
            return served_certificate(address(scene), 443) == second.der

        svc.wait_for(is_renewed, 180, "the new certificate is served")
        assert http.get("/healthz", extensions=sni).status_code == 200, "the former connection stays open"
    with verifying(scene, second) as http:
        page = http.get("/metrics", extensions=sni).text
    assert svc.metric(page, "phalanx_router_groups_ready") == 1
    svc.wait_for(lambda: scene.condition("Balanced") == ("True", "Balanced"), 120, "the operator polls by HTTPS")


@pytest.mark.slow
def test_groups_change_to_internal_tls_without_a_failed_request(scene: Scene) -> None:
    """Two groups of two pods: link, rendezvous and collectives between real nodes, probes of real kubelets."""
    scene.apply(scene.manifest(replicas=2, pods=2, router={}))
    scene.wait_ready(2, 400)
    former = set(scene.groups())
    with scene.traffic() as traffic:
        settled = traffic.answered
        scene.patch({"security": {"tls": "Internal"}})
        svc.wait_for(lambda: scene.is_ready(2) and not former & set(scene.groups()), 600, "both groups are new")
        assert traffic.answered > settled
    assert traffic.failed == []
    secrets = {f"chat-{role}-tls" for role in ("router", "group", "metrics")} | {"chat-authority"}
    assert secrets <= {each["metadata"]["name"] for each in scene.get("secrets")["items"]}
    leader = scene.pods()[f"{min(scene.sets())}-0"]["status"]["podIP"]  # pods of the former groups may still be there
    assert httpx.get(f"http://{leader}:8001/readyz", timeout=10).status_code == 200
    assert httpx.get(f"http://{leader}:8001/metrics", timeout=10).status_code == 404
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{leader}:8000/metrics", timeout=10)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://{leader}:8000/metrics", timeout=10, verify=False)
    svc.wait_for(lambda: scene.condition("Balanced") == ("True", "Balanced"), 120, "the operator polls by mutual TLS")


def test_operator_renews_certificates_while_streams_run(scene: Scene) -> None:
    """Once they are half as old as they may become. A new leader looks within a minute."""
    scene.apply(scene.manifest(replicas=2, pods=2, router={}, security={"tls": "Internal"}))
    scene.wait_ready(2, 400)
    body = {"model": "tiny", "max_tokens": 400, "temperature": 1.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    requests = [{**body, "prompt": f"renewal {number}", "seed": number} for number in range(8)]
    svc.wait_for(lambda: len(scene.pods("phalanx.dev/service=chat")) == 5, 120, "no former pod remains")
    expected = [result.tokens for result in Streams(scene.url, requests).run()]
    pods, restarts, first, count = scene.uids(), scene.restarts(), served(scene), 0
    with ThreadPoolExecutor(1) as threads:
        renewal = threads.submit(renew, scene)
        while not renewal.done():
            results = Streams(scene.url, requests).run()
            assert [(result.error, result.tokens) for result in results] == [(None, tokens) for tokens in expected]
            count += len(results)
        renewal.result()
    assert not first & served(scene), "every pod has another certificate"
    assert (scene.uids(), scene.restarts()) == (pods, restarts)
    svc.wait_for(lambda: scene.condition("Balanced") == ("True", "Balanced"), 120, "the operator polls by mutual TLS")
    print(f"{count} streams while the operator renewed the certificates of {len(pods)} pods and the router")
    scene.delete_service()


def renew(scene: Scene) -> None:
    """Makes the certificates of all roles due, and returns when every pod serves one that the operator has issued since."""
    authority = secret(scene, "authority")
    (signing,) = issuing.read_pairs(authority["ca.crt"], authority["ca.key"])
    made = datetime.now(UTC) - 0.6 * issuing.LIFETIME
    due = {role: issuing.issue(signing, labels.peer_name(role, "chat", scene.namespace), made) for role in ROLES}
    for role, pair in due.items():
        patch = {"data": Issued(pair.pem, pair.key_pem).secret_data}
        scene.kubectl("patch", "secret", f"chat-{role}-tls", "--type=merge", "-p", json.dumps(patch))
    scene.restart_operator()
    svc.wait_for(
        lambda: all(secret(scene, f"{role}-tls")["tls.crt"] != pair.pem.encode() for role, pair in due.items()),
        300,
        "new Secrets",
    )
    sync_mounts(scene, "group")
    sync_mounts(scene)
    issued = {ssl.PEM_cert_to_DER_cert(secret(scene, f"{role}-tls")["tls.crt"].decode()) for role in ("group", "router")}
    svc.wait_for(lambda: served(scene) == issued, 300, "every pod serves the renewed certificate")


def secret(scene: Scene, name: str) -> dict[str, bytes]:
    """Returns the files of a Secret of the service."""
    return {file: base64.b64decode(text) for file, text in scene.get("secret", f"chat-{name}")["data"].items()}


def served(scene: Scene) -> set[bytes]:
    """Returns the certificates that the pods of the service serve to one another."""
    ports = {"group": labels.HTTP_PORT, "router": labels.INTERNAL_PORT}
    return {
        served_certificate(pod["status"]["podIP"], port)
        for component, port in ports.items()
        for pod in scene.pods(f"phalanx.dev/service=chat,phalanx.dev/component={component}").values()
    }
