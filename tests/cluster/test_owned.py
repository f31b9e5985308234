"""Applies without a read rely on the API server: a version that no object has creates only, a UID changes only that object."""

import json
from typing import Any

import pytest

from tests.cluster.fixtures import Cluster
from tools.errors import Failed

pytestmark = pytest.mark.cluster


def test_server_side_apply_honours_its_preconditions(cluster: Cluster, namespace: str) -> None:
    def apply(text: str, **bound: str) -> dict[str, Any]:
        metadata = {"name": "bound", "namespace": namespace} | bound
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": text}}
        flags = ("--server-side", "--force-conflicts", "--field-manager=phalanx-operator", "-o", "json", "-f", "-")
        applied: dict[str, Any] = json.loads(cluster.kubectl("apply", *flags, stdin=json.dumps(body)))
        return applied

    def text() -> str:
        return cluster.kubectl("-n", namespace, "get", "configmap", "bound", "-o", "jsonpath={.data.text}")

    with pytest.raises(Failed, match=r"uid mismatch|Conflict"):
        apply("no object", uid="11111111-1111-1111-1111-111111111111")
    created = apply("first", resourceVersion="1")
    with pytest.raises(Failed, match=r"modified|Conflict"):
        apply("again", resourceVersion="1")
    with pytest.raises(Failed, match=r"uid mismatch|Conflict|metadata\.uid"):
        apply("other UID", uid="11111111-1111-1111-1111-111111111111")
    assert text() == "first"
    apply("second", uid=created["metadata"]["uid"])
    assert text() == "second"
    cluster.kubectl("-n", namespace, "delete", "configmap", "bound")
