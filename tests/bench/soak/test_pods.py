"""Pods, their roles and the processes in them."""

from typing import Any

import pytest

from bench.soak.pods import Pod, object_counts, parse_pod, pids_by_pod, uid_of, uses_of

UID = "22f90396-fb38-4fd1-83a7-30f596e6f030"
NONE = UID[::-1]


def body(labels: dict[str, str], **status: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True"}
    whole = {"podIP": "10.0.0.1", "phase": "Running", "conditions": [ready], **status}
    return {"kind": "Pod", "metadata": {"name": "p", "uid": UID, "labels": labels}, "status": whole}


@pytest.mark.parametrize(
    ("labels", "role", "port"),
    [
        ({"phalanx.dev/component": "router"}, "router", 8000),
        ({"phalanx.dev/component": "group", "apps.kubernetes.io/pod-index": "0"}, "leader", 8000),
        ({"phalanx.dev/component": "group", "apps.kubernetes.io/pod-index": "1"}, "worker", 8000),
        ({"app.kubernetes.io/name": "phalanx-operator"}, "operator", 8080),
    ],
)
def test_role_of_a_pod_decides_its_port(labels: dict[str, str], role: str, port: int) -> None:
    pod = parse_pod(body(labels))
    assert pod == Pod("p", UID, role, "10.0.0.1", True)
    assert pod.url == f"http://10.0.0.1:{port}"


def test_pod_that_does_not_run_is_left_out() -> None:
    assert parse_pod(body({}, podIP="")) is None
    assert parse_pod(body({}, phase="Pending")) is None
    pod = parse_pod(body({}, conditions=[]))
    assert pod is not None and not pod.is_ready


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"8:pids:/x/kubepods/burstable/pod{UID}/60f4\n1:name=systemd:/\n", UID),
        (f"0::/kubepods/pod{UID}/60f4\n", UID),
        ("0::/user.slice\n", None),
        ("", None),
    ],
)
def test_uid_is_in_the_cgroup(cgroup: str, uid: str | None) -> None:
    assert uid_of(cgroup) == uid


def test_unknown_pod_has_no_process() -> None:
    assert pids_by_pod([NONE]) == {NONE: []}
    assert uses_of([Pod("p", NONE, "router", "10.0.0.1", True)])["p"].values == {}


def test_objects_are_counted_by_kind() -> None:
    found = object_counts([{"kind": "Pod"}, {"kind": "Pod"}, {"kind": "Service"}])
    assert found == {"objects": 3.0, "objects Pod": 2.0, "objects Service": 1.0}
