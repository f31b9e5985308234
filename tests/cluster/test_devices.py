"""Devices of groups by dynamic resource allocation. No driver serves the claims here, so pods with them stay pending."""

from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.scenes import Scene

pytestmark = pytest.mark.cluster
RUNTIME = "runtime"


def template(count: int) -> dict[str, Any]:
    """Returns a template of claims for a number of devices."""
    devices = {"requests": [{"name": "gpus", "exactly": {"deviceClassName": "gpu.example.com", "count": count}}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "two-gpus"},
        "spec": {"spec": {"devices": devices}},
    }


def test_each_pod_of_a_group_gets_its_claim(scene: Scene) -> None:
    claim = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    resources = {"accelerator": {"resourceName": ""}, "claims": [claim | {"request": "gpus"}]}
    scene.apply(template(2))
    manifest = scene.manifest(pods=2, resources=resources)
    manifest["spec"]["parallelism"] = {"tensor": 4, "gpusPerPod": 2}
    scene.apply(manifest)
    try:
        svc.wait_for(lambda: len(scene.pods()) == 2, 60, "two pods")
        for pod in scene.pods().values():
            assert pod["spec"]["resourceClaims"] == [claim]
            runtime = next(container for container in pod["spec"]["containers"] if container["name"] == RUNTIME)
            assert runtime["resources"]["claims"] == [{"name": "gpus", "request": "gpus"}]
        svc.wait_for(lambda: len(scene.get("resourceclaims")["items"]) == 2, 60, "one claim per pod")
    finally:
        scene.delete_service()
