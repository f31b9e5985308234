"""What is kept of pods and Deployments."""

from typing import Any

import pytest

from phalanx_operator.decide.snapshot import ObservedPod, ObservedRouter
from phalanx_operator.observe import owner_uid, trim_deployment, trim_pod

READY = {"type": "Ready", "status": "True"}
LOST = "ContainerStatusUnknown"
NO_MODEL = "phalanx-runtime: error: MODEL /opt/no-such-model: no such file or folder"


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
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}, {}, False, "Error"),
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 2}}}]}, {"deletionTimestamp": "now"}, False, ""),
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}, {}, False, ""),
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": LOST}}}]}, {}, False, ""),
    ],
    ids=[
        *("ready", "going", "new", "no node", "being made", "image", "init container", "loading"),
        *("ended", "ended as asked", "done", "with its node"),
    ],
)
def test_pods(status: dict[str, Any], metadata: dict[str, Any], ready: bool, reason: str) -> None:
    seen = pod(status, **metadata)
    assert (seen.ready, seen.reason) == (ready, reason)


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        ({"reason": "Error", "exitCode": 2, "message": f"usage: phalanx-runtime\n{NO_MODEL}\n\n"}, NO_MODEL),
        ({"reason": "Error", "exitCode": 1, "message": '{"level": "ERROR", "message": "no device"}'}, "no device"),
        ({"reason": "Error", "exitCode": 1, "message": '{"level": "ERR'}, '{"level": "ERR'),
        ({"reason": "Error", "exitCode": 1, "message": "[1]"}, "[1]"),
        ({"reason": "OOMKilled", "exitCode": 137, "message": "loading"}, "OOMKilled: loading"),
        ({"reason": "OOMKilled", "exitCode": 137}, "OOMKilled, exit code 137"),
        ({}, "back-off 40s restarting failed container"),
    ],
    ids=["last line", "structured log", "cut log", "not a record", "no memory", "no words", "unknown"],
)
def test_a_pod_that_ends_again_and_again_says_why_it_ended_last(ended: dict[str, Any], message: str) -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    seen = pod({"containerStatuses": [{"state": {"waiting": waiting}, "lastState": {"terminated": ended}}]})
    assert (seen.reason, seen.message) == ("CrashLoopBackOff", message)


def test_a_pod_that_has_just_ended_says_why() -> None:
    seen = pod({"containerStatuses": [{"state": {"terminated": {"reason": "Error", "exitCode": 2, "message": NO_MODEL}}}]})
    assert (seen.reason, seen.message) == ("Error", NO_MODEL)


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
