"""The installed CRD is generated from the models, the samples are valid, and the operator has the permissions that it needs."""

import itertools
import pathlib
from typing import Any

import pytest
import yaml

from phalanx_api.spec.inference_service import InferenceService, parse
from phalanx_operator.__main__ import crd_text
from phalanx_operator.kube.client import RESOURCES
from phalanx_operator.render.objects import SHARED_PAGES
from phalanx_operator.render.revision import revision

ROOT = pathlib.Path(__file__).parents[2]
CRD = ROOT / "crds" / "inferenceservices.yaml"
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))


def test_the_crd_is_the_generated_one(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--golden-update", default=False):
        CRD.write_text(crd_text())
    assert CRD.read_text() == crd_text(), "run `make golden`"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_samples_are_valid(path: pathlib.Path) -> None:
    documents = yaml.safe_load_all(path.read_text())
    body: dict[str, Any] = next(document for document in documents if document["kind"] == "InferenceService")
    body["metadata"] |= {"namespace": "default", "uid": "uid"}
    service = parse(body)
    assert isinstance(service, InferenceService), service
    assert len(revision(service)) == 10


def cluster_role(name: str) -> dict[str, Any]:
    """Returns a ClusterRole of the base."""
    documents = yaml.safe_load_all((ROOT / "manifests" / "base" / "rbac.yaml").read_text())
    found: dict[str, Any] = next(d for d in documents if (d["kind"], d["metadata"]["name"]) == ("ClusterRole", name))
    return found


def rules(name: str = "phalanx-operator") -> list[dict[str, Any]]:
    """Returns its rules."""
    found: list[dict[str, Any]] = cluster_role(name)["rules"]
    return found


def test_operator_may_grant_the_permissions_of_routers() -> None:
    """An account can grant only permissions that it has."""
    pods = [rule for rule in rules() if "pods" in rule["resources"]]
    assert len(pods) == 1 and {"get", "list", "watch"} <= set(pods[0]["verbs"])


def unbounded_verbs() -> dict[tuple[str, str], set[str]]:
    """Returns what the operator may do with objects of any name, by API group and resource."""
    verbs: dict[tuple[str, str], set[str]] = {}
    for rule in rules():
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]) if "resourceNames" not in rule else ():
            verbs.setdefault((group, resource), set()).update(rule["verbs"])
    return verbs


def test_operator_cannot_replace_groups_create_pods_or_list_secrets() -> None:
    verbs = unbounded_verbs()
    assert "update" not in verbs["apps", "statefulsets"]
    assert verbs["", "pods"] & {"create", "update"} == set()
    assert verbs["", "secrets"] == {"get", "create", "patch"}
    assert not any("*" in verb for each in verbs.values() for verb in each)
    (named,) = [rule for rule in rules() if "resourceNames" in rule]
    assert (named["resources"], named["resourceNames"], named["verbs"]) == (["secrets"], [SHARED_PAGES], ["patch"])


def test_rights_beyond_namespaces_only_read() -> None:
    verbs = {resource: rule["verbs"] for rule in rules("phalanx-operator-cluster") for resource in rule["resources"]}
    assert verbs == {kind: ["get", "list", "watch"] for kind in ("customresourcedefinitions", "nodes")}


@pytest.mark.parametrize(("name", "roles"), [("view", 3), ("edit", 2), ("admin", 1)])
def test_roles_of_people_extend_those_of_kubernetes(name: str, roles: int) -> None:
    extended = ["admin", "edit", "view"][:roles]
    labels = cluster_role(f"phalanx-{name}")["metadata"]["labels"]
    assert labels == {f"rbac.authorization.k8s.io/aggregate-to-{role}": "true" for role in extended}
    verbs = {resource: set(rule["verbs"]) for rule in rules(f"phalanx-{name}") for resource in rule["resources"]}
    assert ("delete" in verbs["inferenceservices"], "pods/exec" in verbs) == (name != "view", name == "admin")
    assert "secrets" not in verbs and not verbs.get("inferenceservices/status", set()) & {"patch", "update"}


def test_operator_may_create_and_delete_every_rendered_kind() -> None:
    verbs = unbounded_verbs()
    held = {kind.plural: verbs[kind.api_version.rpartition("/")[0], kind.plural] for kind in RESOURCES.values()}
    assert [kind for kind, has in held.items() if not {"get", "create", "patch"} <= has] == []
    removable = {"poddisruptionbudgets", "networkpolicies", "servicemonitors", "prometheusrules", "ingresses", "httproutes"}
    assert {kind for kind, has in held.items() if "delete" in has} == removable | {"statefulsets"}
