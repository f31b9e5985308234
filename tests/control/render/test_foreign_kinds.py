"""tests/cluster/test_foreign.py covers all kinds of other projects."""

from collections.abc import Iterable
from typing import Any, get_args

import yaml

from phalanx_api.spec import inference_service as api
from phalanx_operator.kube.client import RESOURCES
from phalanx_operator.observe.api_discovery import POD_GROUPS
from phalanx_operator.render import gangs
from phalanx_operator.render.gangs import GangKind
from tests.cluster.foreign import SOURCES
from tests.cluster.written import MANIFESTS, written
from tests.control.builders import make_service

NOT_FOREIGN = {
    *("", "apps", "batch", "policy", "networking.k8s.io", "rbac.authorization.k8s.io", "scheduling.k8s.io", "autoscaling"),
    *("apiextensions.k8s.io", "admissionregistration.k8s.io", api.GROUP, "kustomize.config.k8s.io"),
}
"""API groups of Kubernetes, Phalanx and kustomize."""
Kind = tuple[str, str]


def foreign(bodies: Iterable[dict[str, Any]]) -> set[Kind]:
    """Returns the kinds of other projects, with versions."""
    kinds = {(body["apiVersion"], body["kind"]) for body in bodies}
    return {(version, kind) for version, kind in kinds if _group(version) not in NOT_FOREIGN}


def _group(version: str) -> str:
    return version.rpartition("/")[0]


COVERED = foreign(written().values())


def test_every_rendered_kind_is_covered() -> None:
    assert foreign({"apiVersion": version, "kind": kind} for version, kind in RESOURCES) <= COVERED


def test_every_object_of_every_gang_is_covered() -> None:
    service = make_service(placement={"queueName": "team"})
    objects = [body for kind in get_args(GangKind) for body in gangs.gang_of_kind(kind).objects(service, "chat-g-x", "uid", 2)]
    assert {body["apiVersion"] for body in objects} == set(POD_GROUPS), "the discovered kinds"
    assert foreign(objects) <= COVERED


def test_every_object_of_the_manifests_and_samples_is_covered() -> None:
    files = [path for path in MANIFESTS.rglob("*.yaml") if "chart" not in path.parts]
    bodies = [body for path in files for body in yaml.safe_load_all(path.read_text()) if body]
    names = {f"{body['kind']} {body['metadata']['name']}" for body in bodies if foreign([body])}
    assert names and names <= set(written())


def test_each_kind_has_a_fetched_crd() -> None:
    fetched = {file.rpartition("/")[2].removesuffix(".yaml") for source in SOURCES for file in source.files}
    needed = {f"{_group(version)}_{kind.lower()}s" for version, kind in COVERED}
    assert needed == fetched
