"""A real API server evaluates the CRD's rules, and its errors name the field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tests.cluster.rule_cases import REFUSED, STRANGE, Refused, scaled
from tools.errors import Failed

pytestmark = pytest.mark.cluster
MANIFESTS = Path(__file__).parents[2] / "manifests"
ZERO = {"enabled": True}


def dry_run(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> str:
    manifest = svc.manifest("rules", model="hf://org/name", replicas=1)
    manifest["spec"] |= spec
    return cluster.kubectl("-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(manifest))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.field)
def test_each_rule_rejects_its_invalid_manifest(cluster: Cluster, namespace: str, case: Refused) -> None:
    """One line of the error starts with the field."""
    with pytest.raises(Failed, match=rf"(^|[ ]){re.escape(case.field)}: .*{re.escape(case.words)}"):
        dry_run(cluster, namespace, case.spec)


REFUSED_TO_TENANTS: dict[str, dict[str, Any]] = {
    "podTemplate": {"podTemplate": {}},
    "engine.image": {"engine": {"image": "image:1"}},
    "router.expose": {"router": {"expose": {"type": "Ingress"}}},
    "router.podTemplate": {"router": {"podTemplate": {}}},
    "router.oidc": {"router": {"oidc": {"issuer": "https://a.example", "audiences": ["a"]}}},
    "router.imageHosts": {"router": {"imageHosts": ["a.example"]}},
    "observability.tracing": {"observability": {"tracing": {"endpoint": "http://collector:4318"}}},
}


def test_tenants_are_refused_what_runs_pods(cluster: Cluster, namespace: str) -> None:
    policy = (MANIFESTS / "components" / "tenants" / "policy.yaml").read_text()
    manifest = svc.manifest("rules", model="hf://org/name", replicas=1)
    plain = {name: value for name, value in manifest["spec"].items() if name != "podTemplate"}

    def create(spec: dict[str, Any]) -> None:
        body = json.dumps(manifest | {"spec": plain | spec})
        cluster.kubectl("-n", namespace, "create", "--dry-run=server", "-f", "-", stdin=body)

    def is_refused(name: str) -> bool:
        try:
            create(REFUSED_TO_TENANTS[name])
        except Failed as error:
            return f"spec.{name} is for administrators" in str(error)
        return False

    cluster.kubectl("apply", "-f", "-", stdin=policy)
    try:
        create(REFUSED_TO_TENANTS["podTemplate"])  # without the label
        cluster.kubectl("label", "namespace", namespace, "phalanx-tenant=true")
        svc.wait_for(lambda: is_refused("podTemplate"), 60, "the policy refuses a pod template")
        assert [name for name in REFUSED_TO_TENANTS if not is_refused(name)] == []
        create({})
    finally:
        cluster.kubectl("label", "namespace", namespace, "phalanx-tenant-")
        cluster.kubectl("delete", "-f", "-", stdin=policy)


ROLES = ("view", "edit", "admin")
SERVICES = "inferenceservices.phalanx.dev"
PERMITTED: dict[tuple[str, str, str], str] = {
    ("get", SERVICES, ""): "view edit admin",
    ("watch", SERVICES, ""): "view edit admin",
    ("get", SERVICES, "status"): "view admin",
    ("create", SERVICES, ""): "edit admin",
    ("delete", SERVICES, ""): "edit admin",
    ("patch", SERVICES, "scale"): "edit admin",
    ("patch", SERVICES, "status"): "",
    ("update", SERVICES, "status"): "",
    ("list", "pods", ""): "admin",
    ("get", "pods", "log"): "admin",
    ("get", "pods", "proxy"): "admin",
    ("create", "pods", "exec"): "admin",
    ("list", "events", ""): "admin",
    ("patch", "statefulsets.apps", ""): "admin",
    ("delete", "statefulsets.apps", ""): "",
    ("create", "pods", ""): "",
    ("get", "secrets", ""): "",
    ("list", "secrets", ""): "",
    ("create", "rolebindings.rbac.authorization.k8s.io", ""): "",
}
"""Verb, resource and subresource, and the roles for people that permit them."""


def test_roles_for_people_permit_what_they_state(cluster: Cluster, namespace: str) -> None:
    def may(role: str, request: tuple[str, str, str], where: str) -> bool:
        verb, resource, subresource = request
        words = ["auth", "can-i", verb, resource, "-n", where, "--as", f"rules-{role}"]
        try:
            answer = cluster.kubectl(*words, *([f"--subresource={subresource}"] if subresource else []))
        except Failed as error:  # with exit status 1
            assert str(error).endswith("no"), error
            return False
        return answer.strip() == "yes"

    for role in ROLES:
        words = ("create", "rolebinding", f"rules-{role}", f"--clusterrole=phalanx-{role}", f"--user=rules-{role}")
        cluster.kubectl("-n", namespace, *words)
    read = ("get", SERVICES, "")
    svc.wait_for(lambda: all(may(role, read, namespace) for role in ROLES), 60, "the roles are bound")
    found = {request: " ".join(role for role in ROLES if may(role, request, namespace)) for request in PERMITTED}
    assert found == PERMITTED
    assert not may("admin", read, "default"), "the binding is for one namespace"


@pytest.mark.parametrize(("field", "spec"), STRANGE.items(), ids=STRANGE)
def test_unknown_field_is_rejected(cluster: Cluster, namespace: str, field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(Failed, match=f'unknown field "{re.escape(field)}"'):
        dry_run(cluster, namespace, spec)


def test_valid_manifest_is_accepted_with_defaults(cluster: Cluster, namespace: str) -> None:
    schedule = {"cron": "0 8 * * mon-fri", "timezone": "Europe/Berlin", "min": 0, "max": 2}
    accepted = json.loads(dry_run(cluster, namespace, scaled(minReplicas=0, scaleToZero=ZERO, schedules=[schedule])))["spec"]
    assert accepted["autoscaling"]["mode"] == "Internal"
    assert accepted["drain"] == {"preStopSeconds": 0, "timeoutSeconds": 300}
    assert accepted["rebalancing"]["mode"] == "Migrate"


def test_repeated_name_of_a_claim_is_rejected(cluster: Cluster, namespace: str) -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one"}
    with pytest.raises(Failed, match=r"spec\.resources\.claims\[1\]: Duplicate value"):
        dry_run(cluster, namespace, {"resources": {"claims": [claim, claim]}})


@pytest.mark.parametrize("uri", ["s3://models/tiny", "gs://models/tiny", "oci://registry.example/tiny:v1"])
def test_each_remote_source_is_accepted_with_its_secret(cluster: Cluster, namespace: str, uri: str) -> None:
    accepted = json.loads(dry_run(cluster, namespace, {"model": {"uri": uri, "secretRef": {"name": "a"}}}))["spec"]
    assert accepted["model"] == {"uri": uri, "secretRef": {"name": "a", "key": "token"}}


@pytest.mark.parametrize("percent", [95, 99, 99.9, 99.999])
def test_availability_may_have_decimals(cluster: Cluster, namespace: str, percent: float) -> None:
    """The API server prints the bound of integers as 99."""
    accepted = json.loads(dry_run(cluster, namespace, {"slo": {"availability": percent}}))["spec"]
    assert accepted["slo"] == {"availability": percent}
