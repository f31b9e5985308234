"""Devices of groups by dynamic resource allocation. No driver serves the claims here, so pods with them stay pending."""

import pytest

from tests.cluster import service as svc
from tests.cluster.scenes import Scene

pytestmark = pytest.mark.cluster
RUNTIME = "runtime"
DEVICE_CLASS = "gpu.example.com"
DEVICES = {"requests": [{"name": "gpus", "exactly": {"deviceClassName": DEVICE_CLASS, "count": 2}}]}
TEMPLATE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "two-gpus"},
    "spec": {"spec": {"devices": DEVICES}},
}


def test_each_pod_of_a_group_gets_its_claim(scene: Scene) -> None:
    claim = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    resources = {"accelerator": {"resourceName": ""}, "claims": [claim | {"request": "gpus"}]}
    scene.apply(TEMPLATE)
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
        svc.wait_for(lambda: DEVICE_CLASS in scene.message("CapacityAvailable"), 60, "the scheduler's message is reported")
        assert scene.condition("CapacityAvailable") == ("False", "Unschedulable")
    finally:
        scene.delete_service()
