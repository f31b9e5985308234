"""What is kept of pods and Deployments."""

from typing import Any

import pytest

from phalanx_operator.decide.snapshot import ObservedPod, ObservedRouter
from phalanx_operator.observe import owner_uid, trim_deployment, trim_pod

READY = {"type": "Ready", "status": "True"}


def pod(status: dict[str, Any], **metadata: Any) -> ObservedPod:
    return trim_pod({"metadata": {"name": "p", **metadata}, "status": status})


@pytest.mark.parametrize(
    ("status", "metadata", "ready", "reason"),
    [
        ({"conditions": [READY]}, {}, True, ""),
        ({"conditions": [READY]}, {"deletionTimestamp": "now"}, False, ""),
        ({}, {}, False, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}, {}, False, "Unschedulable"),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, {}, False, ""),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, {}, False, "ErrImagePull"),
        ({"initContainerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}, {}, False, "CrashLoopBackOff"),
        ({"containerStatuses": [{"state": {"running": {}}}]}, {}, False, ""),
    ],
    ids=["ready", "going", "new", "no node", "being made", "image", "init container", "loading"],
)
def test_pods(status: dict[str, Any], metadata: dict[str, Any], ready: bool, reason: str) -> None:
    seen = pod(status, **metadata)
    assert (seen.ready, seen.reason) == (ready, reason)


@pytest.mark.parametrize(("label", "index"), [("3", 3), ("x", 0), (None, 0)])
def test_the_index_of_a_pod(label: str | None, index: int) -> None:
    labels = {"apps.kubernetes.io/pod-index": label} if label else None
    assert pod({}, labels=labels).index == index


@pytest.mark.parametrize(
    ("status", "current", "settled"),
    [
        ({"observedGeneration": 2, "updatedReplicas": 2, "readyReplicas": 2}, True, True),
        ({"observedGeneration": 1, "updatedReplicas": 2, "readyReplicas": 2}, False, False),
        ({"observedGeneration": 2, "updatedReplicas": 1, "readyReplicas": 2}, True, False),
        ({}, False, False),
    ],
    ids=["settled", "not seen yet", "rolling", "new"],
)
def test_routers(status: dict[str, Any], current: bool, settled: bool) -> None:
    body = {"metadata": {"name": "r", "generation": 2}, "spec": {"replicas": 2}, "status": status}
    router: ObservedRouter = trim_deployment(body).router
    assert (router.current, router.settled) == (current, settled)


def test_only_the_controller_counts_as_owner() -> None:
    assert owner_uid({"ownerReferences": [{"uid": "a"}, {"uid": "b", "controller": True}]}) == "b"
    assert owner_uid({}) == ""
