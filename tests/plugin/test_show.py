"""What the plugin prints: texts from objects, with no cluster."""

from typing import Any

import pytest

from phalanx_kubectl import show
from phalanx_kubectl.gauges import GroupLoad, RouterLoad, merged, read_router

GROUPS = [
    {
        "name": "chat-g-b",
        "revision": "r2",
        "phase": "Starting",
        "pods": 2,
        "readyPods": 1,
        "nodes": ["n1"],
        "reason": "ErrImagePull",
    },
    {"name": "chat-g-a", "revision": "r1", "phase": "Ready", "pods": 2, "readyPods": 2, "nodes": ["n1", "n2"]},
]
CONDITIONS = [
    {
        "type": "Ready",
        "status": "False",
        "reason": "RollingOut",
        "message": "1 of 2",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    },
    {"type": "Balanced", "status": "True", "reason": "Balanced", "lastTransitionTime": "2026-01-02T03:00:00Z"},
]


def body(**status: Any) -> dict[str, Any]:
    said = {
        "observedGeneration": 3,
        "replicas": 2,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "currentRevision": "r1",
        "updateRevision": "r2",
        "url": "http://chat.team.svc",
        "groups": GROUPS,
        "conditions": CONDITIONS,
    }
    metadata = {"namespace": "team", "name": "chat", "generation": 3}
    return {"metadata": metadata, "spec": {"replicas": 2, "model": {"uri": "hf://a/b"}}, "status": said | status}


BARE = {"metadata": {"namespace": "team", "name": "new", "generation": 1}, "spec": {}}


def test_columns_are_as_wide_as_they_need_to_be() -> None:
    assert show.table(["A", "LONG"], [("xyz", 1), (None, "")]) == "A     LONG\nxyz   1\n-     -\n"


def test_each_service_is_one_line_with_or_without_status() -> None:
    assert show.services([body(), BARE], with_namespace=False) == (
        "NAME   READY     REASON       GROUPS   UPDATED   DRAINING   REVISION\n"
        "chat   False     RollingOut   1/2      1         0          r2\n"
        "new    Unknown   -            0/0      0         0          -\n"
    )
    assert show.services([body()], with_namespace=True).splitlines()[1].startswith("team        chat")
    assert show.services([], with_namespace=True) == "no inference services found\n"


def test_a_service_in_full() -> None:
    assert show.status(body()) == (
        "Service:  team/chat\n"
        "URL:      http://chat.team.svc\n"
        "Model:    hf://a/b\n"
        "Revision: r1 -> r2\n"
        "Groups:   1 of 2 ready, 0 draining\n"
        "\n"
        "CONDITION   STATUS   REASON       SINCE                  MESSAGE\n"
        "Ready       False    RollingOut   2026-01-02T03:04:05Z   1 of 2\n"
        "Balanced    True     Balanced     2026-01-02T03:00:00Z   -\n"
    )


def test_model_version_is_shown_if_known() -> None:
    told = body()
    told["status"]["model"] = {"resolvedRevision": "c0ffee", "cachedNodes": 2}
    assert "Model:    hf://a/b at c0ffee\n" in show.status(told)
    told["status"]["model"] = {"resolvedRevision": "", "cachedNodes": 0}
    assert "Model:    hf://a/b\n" in show.status(told)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"observedGeneration": 2}, "Note:     the operator has not observed the last change yet"),
        ({"autoscaling": {"desired": 3, "minReplicas": 1, "maxReplicas": 8}}, "Scaling:  3 groups desired, 1 to 8 allowed\n"),
        ({"autoscaling": {"desired": 3, "reason": "Out", "message": "kv 90"}}, "3 groups desired, 0 to 0 allowed (Out: kv 90)"),
        (
            {"rebalancing": {"hotspots": [{"group": "g", "cause": "kv", "since": "s", "action": "shed"}]}},
            "g         kv      s       shed",
        ),
        ({"currentRevision": "r2"}, "Revision: r2\n"),
    ],
)
def test_status_details_table(status: dict[str, Any], words: str) -> None:
    assert words in show.status(body(**status))


def test_a_service_that_no_operator_saw() -> None:
    assert show.status(BARE) == (
        "Service:  team/new\nGroups:   0 of 0 ready, 0 draining\nNote:     the operator has not observed the last change yet\n"
    )
    assert show.groups(BARE, {}) == "no groups\n"
    assert show.top(BARE, {}, {}) == "no groups\n"


def test_groups_are_shown_with_and_without_router_reports() -> None:
    assert show.groups(body(), {"chat-g-a": GroupLoad(streams=7, incarnation=3)}) == (
        "NAME       REVISION   PHASE      PODS   INCARNATION   STREAMS   NODES   REASON\n"
        "chat-g-b   r2         Starting   1/2    -             -         n1      ErrImagePull\n"
        "chat-g-a   r1         Ready      2/2    3             7         n1,n2   -\n"
    )


def test_groups_that_the_status_does_not_list_are_counted() -> None:
    assert show.groups(body(replicas=70, drainingReplicas=1), {}).endswith("and 69 more ready groups\n")


def test_top() -> None:
    load = GroupLoad(streams=7, running=6, waiting=1, kv=0.456, step_s=0.0314, incarnation=3)
    assert show.top(body(), {"chat-router-x": RouterLoad(7, 2, 1)}, {"chat-g-a": load}) == (
        "GROUP      STREAMS   RUNNING   WAITING   KV    STEP\n"
        "chat-g-a   7         6         1         46%   31ms\n"
        "chat-g-b   -         -         -         -     -\n"
        "\n"
        "ROUTER          STREAMS   QUEUED   HELD\n"
        "chat-router-x   7         2        1\n"
    )


METRICS = """# HELP phalanx_router_streams Open streams.
# TYPE phalanx_router_streams gauge
phalanx_router_streams 5.0
phalanx_router_queued_requests 2.0
phalanx_router_group_streams{group="g-a"} 5.0
phalanx_router_group_running_requests{group="g-a"} 8.0
phalanx_router_group_kv_use{group="g-a"} 0.25
phalanx_router_group_step_seconds{group="g-a"} NaN
phalanx_router_group_incarnation{group="g-a"} 2.0
phalanx_router_hotspot{cause="kv",group="g-b"} 1.0
phalanx_router_wait_seconds_bucket{le="+Inf"} +Inf
something else entirely
"""


def test_a_routers_metrics_are_read() -> None:
    read = read_router(METRICS)
    assert (read.streams, read.queued, read.held) == (5, 2, 0)
    assert read.groups == {"g-a": GroupLoad(streams=5, running=8, kv=0.25, incarnation=2)}


def test_stream_counts_are_summed_over_routers() -> None:
    other = RouterLoad(groups={"g-a": GroupLoad(streams=3, running=8, kv=0.5, incarnation=1), "g-c": GroupLoad(streams=1)})
    assert merged([read_router(METRICS), other]) == {
        "g-a": GroupLoad(streams=8, running=8, kv=0.5, incarnation=2),
        "g-c": GroupLoad(streams=1),
    }


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"holderIdentity": "op-1", "renewTime": "2026-01-02T03:04:00.5Z", "leaseDurationSeconds": 15}, "op-1 leads"),
        (
            {"holderIdentity": "op-1", "renewTime": "2026-01-02T03:00:00Z", "leaseDurationSeconds": 15},
            "op-1 renewed its lease 245 s ago: the status below may be out of date",
        ),
        ({"holderIdentity": "", "renewTime": "2026-01-02T03:04:00Z"}, "no leader: the status below may be out of date"),
        ({}, "no leader: the status below may be out of date"),
    ],
    ids=["it leads", "silent", "given back", "never"],
)
def test_missing_leader_is_shown_with_the_age_of_status(spec: dict[str, Any], told: str) -> None:
    assert show.leader({"spec": spec}, "2026-01-02T03:04:05Z") == told
    assert f"Operator: {told}\n" in show.status(body(), told)
