"""Records of pods, Deployments and nodes."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from phalanx_operator.decide.state.snapshot import ObservedPod, ObservedRouter
from phalanx_operator.kube.informer import read_event
from phalanx_operator.observe.observe import owner_uid, read_deployment, read_name, read_node, read_pod, read_set

READY = {"type": "Ready", "status": "True"}
NODE_LOST = "ContainerStatusUnknown"
NO_MODEL = "phalanx-runtime: error: MODEL /opt/no-such-model: no such file or folder"


def pod(status: dict[str, Any], **metadata: Any) -> ObservedPod:
    return read_pod({"metadata": {"name": "p", **metadata}, "status": status})


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
        ({"containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": NODE_LOST}}}]}, {}, False, ""),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, {}, False, "UnexpectedAdmissionError"),
        ({"phase": "Failed", "reason": "Evicted"}, {"deletionTimestamp": "now"}, False, ""),
    ],
    ids=[
        *("ready", "terminating", "new", "unschedulable", "creating", "image", "init container", "loading"),
        *("failed", "terminated", "completed", "node lost", "refused", "evicted and deleted"),
    ],
)
def test_pods(status: dict[str, Any], metadata: dict[str, Any], ready: bool, reason: str) -> None:
    observed = pod(status, **metadata)
    assert (observed.ready, observed.reason) == (ready, reason)


MIXED = "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity/selector."
NO_MATCH = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."


@pytest.mark.parametrize(
    ("selector", "message", "why"),
    [
        ({"disk": "nvme"}, NO_MATCH, f"no node matches the nodeSelector (disk=nvme) of the pod: {NO_MATCH}"),
        (None, NO_MATCH, f"no node matches the affinity of the pod: {NO_MATCH}"),
        ({"disk": "nvme"}, MIXED, f"{MIXED} The pod requires nodes with disk=nvme."),
        (
            {"disk": "nvme"},
            "0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate, preemption: 0/2 nodes are available.",
            "0/2 nodes are available: 2 Insufficient cpu.",
        ),
    ],
)
def test_unscheduled_pod_names_what_it_requires(selector: dict[str, str] | None, message: str, why: str) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    body = {"metadata": {"name": "p"}, "spec": {"nodeSelector": selector}, "status": {"conditions": [scheduled]}}
    observed = read_event(msgspec.json.encode({"type": "ADDED", "object": body}))["object"]
    assert read_pod(observed).message == why


@pytest.mark.parametrize(
    ("terminated", "message"),
    [
        ({"reason": "Error", "exitCode": 2, "message": f"usage: phalanx-runtime\n{NO_MODEL}\n\n"}, NO_MODEL),
        ({"reason": "Error", "exitCode": 1, "message": '{"level": "ERROR", "message": "no device"}'}, "no device"),
        ({"reason": "Error", "exitCode": 1, "message": '{"level": "ERR'}, '{"level": "ERR'),
        ({"reason": "Error", "exitCode": 1, "message": "[1]"}, "[1]"),
        ({"reason": "OOMKilled", "exitCode": 137, "message": "loading"}, "OOMKilled: loading"),
        ({"reason": "OOMKilled", "exitCode": 137}, "OOMKilled, exit code 137"),
        ({}, "back-off 40s restarting failed container"),
    ],
    ids=["last line", "structured log", "cut log", "no JSON object", "out of memory", "no message", "unknown"],
)
def test_crash_looping_pod_reports_its_last_termination(terminated: dict[str, Any], message: str) -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    observed = pod({"containerStatuses": [{"state": {"waiting": waiting}, "lastState": {"terminated": terminated}}]})
    assert (observed.reason, observed.message) == ("CrashLoopBackOff", message)


def test_terminated_pod_reports_its_reason() -> None:
    observed = pod({"containerStatuses": [{"state": {"terminated": {"reason": "Error", "exitCode": 2, "message": NO_MODEL}}}]})
    assert (observed.reason, observed.message) == ("Error", NO_MODEL)


@pytest.mark.parametrize(("label", "index"), [("3", 3), ("x", 0), (None, 0)])
def test_pod_index(label: str | None, index: int) -> None:
    labels = {"apps.kubernetes.io/pod-index": label} if label else None
    assert pod({}, labels=labels).index == index


@pytest.mark.parametrize(
    ("status", "is_current", "is_settled"),
    [
        ({"observedGeneration": 2, "updatedReplicas": 2, "readyReplicas": 2}, True, True),
        ({"observedGeneration": 1, "updatedReplicas": 2, "readyReplicas": 2}, False, False),
        ({"observedGeneration": 2, "updatedReplicas": 1, "readyReplicas": 2}, True, False),
        ({}, False, False),
    ],
    ids=["settled", "not observed yet", "rolling", "new"],
)
def test_routers(status: dict[str, Any], is_current: bool, is_settled: bool) -> None:
    body = {"metadata": {"name": "r", "generation": 2}, "spec": {"replicas": 2}, "status": status}
    router: ObservedRouter = read_deployment(body).router
    assert (router.is_current, router.is_settled) == (is_current, is_settled)


def test_only_the_controller_is_an_owner() -> None:
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


@pytest.mark.parametrize("read", [read_pod, read_set, read_deployment, read_node, read_name])
def test_watch_records_contain_every_used_field(read: Callable[[Mapping[str, Any]], object]) -> None:
    bare = {"metadata": {name: METADATA[name] for name in ("name", "uid", "creationTimestamp")}, "spec": {}, "status": None}
    full = {"apiVersion": "v1", "kind": "K", "metadata": METADATA, "spec": SPEC, "status": STATUS}
    for body in (full, bare):
        event = read_event(msgspec.json.encode({"type": "MODIFIED", "object": body}))
        assert read(event["object"]) == read(body)
    assert read(full) != read(bare)
    assert "managedFields" not in event["object"]["metadata"] and "containers" not in event["object"]["spec"]


@pytest.mark.parametrize("line", [b'{"type": "ADDED", "object": {"metadata": {"labels": 1}}}', b'{"type": "ADDED"}', b"[]"])
def test_malformed_event_raises(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_event(line)
