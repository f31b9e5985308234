"""What is kept of pods and Deployments."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from phalanx_operator.decide.state.snapshot import ObservedPod, ObservedRouter
from phalanx_operator.kube.informer import read_event
from phalanx_operator.observe.observe import owner_uid, trim_deployment, trim_name, trim_node, trim_pod, trim_set

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
def test_crash_looping_pod_reports_its_last_termination(ended: dict[str, Any], message: str) -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    seen = pod({"containerStatuses": [{"state": {"waiting": waiting}, "lastState": {"terminated": ended}}]})
    assert (seen.reason, seen.message) == ("CrashLoopBackOff", message)


def test_terminated_pod_reports_its_reason() -> None:
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


METADATA: dict[str, Any] = {
    "name": "p",
    "namespace": "team",
    "uid": "1-2",
    "resourceVersion": "7",
    "generation": 3,
    "creationTimestamp": "2026-01-01T00:00:00Z",
    "deletionTimestamp": "2026-01-01T00:00:09Z",
    "deletionGracePeriodSeconds": 5,
    "labels": {
        **{
            "phalanx.dev/service": "a",
            "phalanx.dev/component": "group",
            "phalanx.dev/revision": "r",
            "phalanx.dev/gang": "Native",
        },
        "apps.kubernetes.io/pod-index": "1",
    },
    "annotations": {
        **{"phalanx.dev/draining": "2026-01-01T00:00:03Z asked why", "phalanx.dev/retried": "2026-01-01T00:00:04Z"},
        "phalanx.dev/restarts": '{"containers": 3, "at": ["2026-01-01T00:00:02Z"]}',
    },
    "ownerReferences": [
        {"kind": "Other", "name": "b", "uid": "other", "controller": False},
        {"kind": "InferenceService", "name": "a", "uid": "owner", "controller": True},
    ],
    "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"f:replicas": {}}}}],
}
STATUS = {
    "phase": "Running",
    "podIP": "10.0.0.1",
    "conditions": [
        {"type": kind, "status": "True", "message": "is forbidden: no room", "lastTransitionTime": "2026-01-01T00:00:01Z"}
        for kind in ("Ready", "PodScheduled", "ReplicaFailure")
    ],
    "containerStatuses": [{"restartCount": 2, "lastState": {"terminated": {"exitCode": 1, "message": "no device"}}}],
    **{"observedGeneration": 3, "updatedReplicas": 2, "readyReplicas": 1},
}
SPEC = {"nodeName": "n", "replicas": 2, "unschedulable": True, "containers": [{"name": "c", "image": "i"}], "template": {}}


@pytest.mark.parametrize("trim", [trim_pod, trim_set, trim_deployment, trim_node, trim_name])
def test_watch_records_contain_every_used_field(trim: Callable[[Mapping[str, Any]], object]) -> None:
    bare = {"metadata": {name: METADATA[name] for name in ("name", "uid", "creationTimestamp")}, "spec": {}, "status": None}
    whole = {"apiVersion": "v1", "kind": "K", "metadata": METADATA, "spec": SPEC, "status": STATUS}
    for body in (whole, bare):
        told = read_event(msgspec.json.encode({"type": "MODIFIED", "object": body}))
        assert trim(told["object"]) == trim(body)
    assert trim(whole) != trim(bare)
    assert "managedFields" not in told["object"]["metadata"] and "containers" not in told["object"]["spec"]


@pytest.mark.parametrize("line", [b'{"type": "ADDED", "object": {"metadata": {"labels": 1}}}', b'{"type": "ADDED"}', b"[]"])
def test_object_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_event(line)
