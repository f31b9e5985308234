"""Streams survive disturbances of groups: 64 streams on three groups of TP 2, disturbed in their middle.

The tests share a service and run in order; each leaves it Ready with three groups. Every stream is complete and equals the
undisturbed run, greedy and seeded, and the router sends no 5xx.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.cluster import killing, tiny_model
from tests.cluster import service as svc
from tests.cluster.chat import GROUPS, ROUTERS, SPEED_DECAY_S, Chat
from tests.cluster.clients import MAX_PART, StreamResult, Streams
from tests.cluster.fixtures import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NUM_STREAMS, TOKENS = 64, 600
STOP_A_RANK = """
import os, signal, pathlib
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and b"phalanx_runtime.rank\\0" in (entry / "cmdline").read_bytes() + b"\\0":
        os.kill(int(entry.name), signal.SIGSTOP)
        print("stopped", entry.name)
        break
else:
    raise SystemExit("no rank here")
"""


class Fleet(Chat):
    """The service under test."""

    def manifest(self, model: str, **spec: Any) -> dict[str, Any]:
        """Returns three groups that may place both pods on one node, so that either node can be drained."""
        manifest = svc.manifest("chat", model=f"pvc://models/{model}", replicas=3, servedNames=["tiny"], **spec)
        del manifest["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
        manifest["spec"]["engine"] |= {"kvCacheMemory": "64Mi", "maxModelLen": 2048}
        return self.cluster.with_site_packages(manifest)

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def replays(self) -> float:
        """Returns the number of streams that the router resumed by replay."""
        return self.router_metric("phalanx_router_replays_total")

    def responses(self) -> dict[str, float]:
        """Returns the router's responses by status."""
        page = httpx.get(f"{self.url}/metrics", timeout=10).text
        counts: dict[str, float] = {}
        for line in page.splitlines():
            if line.startswith("phalanx_router_http_responses_total{"):
                status = line.partition('status="')[2].partition('"')[0]
                counts[status] = counts.get(status, 0.0) + float(line.rpartition(" ")[2])
        return counts


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, operator: str, namespace: str) -> Iterator[Fleet]:
    """The service, Ready with three groups."""
    cluster.claim(namespace, "models", tiny_model.folder())
    fleet = Fleet(cluster, namespace)
    fleet.apply(fleet.manifest(tiny_model.NAME))
    fleet.wait_ready(3)
    yield fleet
    fleet.kubectl("delete", "infsvc", "chat")


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[StreamResult]:
    """Results of the streams without a disturbance."""
    results = Streams(fleet.url, bodies()).run()
    assert [(result.error, result.finish, result.usage, len(result.tokens)) for result in results] == [
        (None, "length", TOKENS, TOKENS)
    ] * NUM_STREAMS
    return results


def bodies() -> list[dict[str, Any]]:
    """Returns greedy and seeded requests."""
    fixed: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    sampling = [{"temperature": 0.0}, {"temperature": 1.0}]
    return [{**fixed, **sampling[i % 2], "prompt": f"stream number {i} begins", "seed": 100 + i} for i in range(NUM_STREAMS)]


def assert_complete(results: list[StreamResult]) -> None:
    assert [result.error for result in results] == [None] * NUM_STREAMS
    assert [(result.finish, result.usage, len(result.tokens)) for result in results] == [("length", TOKENS, TOKENS)] * NUM_STREAMS


def check_streams(fleet: Fleet, undisturbed: list[StreamResult], action: Callable[[], object]) -> None:
    """Runs the action when all streams have between a quarter and three quarters, and compares the results."""
    time.sleep(SPEED_DECAY_S)
    streams = Streams(fleet.url, bodies(), action)
    results = streams.run()
    assert streams.spread is not None and streams.spread[1] <= MAX_PART, streams.spread
    assert_complete(results)
    different = [
        i for i, (result, expected) in enumerate(zip(results, undisturbed, strict=True)) if result.tokens != expected.tokens
    ]
    assert not different, f"{len(different)} streams differ: {different}"


def check_disturbance(fleet: Fleet, undisturbed: list[StreamResult], action: Callable[[], object]) -> None:
    """Like `check_streams`; the router must answer only with 200."""
    before = fleet.responses()
    check_streams(fleet, undisturbed, action)
    after = fleet.responses()
    assert {status for status, count in after.items() if count > before.get(status, 0.0)} == {"200"}


@pytest.mark.parametrize("pod", ["0", "1"], ids=["leader", "worker"])
def test_a_pod_killed(fleet: Fleet, undisturbed: list[StreamResult], pod: str) -> None:
    """Killed programs cannot move their streams."""
    replays = fleet.replays()
    check_disturbance(
        fleet, undisturbed, lambda: killing.kill(fleet.cluster, fleet.namespace, f"{fleet.busiest()}-{pod}", "phalanx")
    )
    assert fleet.replays() > replays
    fleet.wait_ready(3)


@pytest.mark.parametrize("pod", ["0", "1"], ids=["leader", "worker"])
def test_a_pod_deleted_at_once(fleet: Fleet, undisturbed: list[StreamResult], pod: str) -> None:
    """The pod receives SIGTERM and has a second or two."""
    takeovers = fleet.num_takeovers()
    delete = ("--grace-period=0", "--force", "--wait=false")
    check_disturbance(fleet, undisturbed, lambda: fleet.kubectl("delete", "pod", f"{fleet.busiest()}-{pod}", *delete))
    assert fleet.num_takeovers() > takeovers
    fleet.wait_ready(3)


def test_a_rank_stopped(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    replays = fleet.replays()
    stop = ("-c", "runtime", "--", "python3", "-c", STOP_A_RANK)
    check_disturbance(fleet, undisturbed, lambda: fleet.kubectl("exec", f"{fleet.busiest()}-1", *stop))
    assert fleet.replays() > replays
    fleet.wait_ready(3)


def test_deleted_router_serves_its_streams_to_the_end(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    """It is the only router; its successor serves the next request."""
    (former,) = fleet.pods(ROUTERS)
    check_streams(fleet, undisturbed, lambda: fleet.kubectl("delete", "pod", former, "--wait=false"))
    svc.wait_for(lambda: former not in fleet.pods(ROUTERS), 60, "the former router is deleted")
    fleet.wait_ready(3)


def test_a_statefulset_deleted(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    moves_before = fleet.num_moves()
    check_disturbance(fleet, undisturbed, lambda: fleet.kubectl("delete", "statefulset", fleet.busiest(), "--wait=false"))
    assert fleet.num_moves() > moves_before
    fleet.wait_ready(3)


def test_a_node_drained(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    moves_before, node = fleet.num_moves(), fleet.pods()[f"{fleet.groups()[0]}-0"]["spec"]["nodeName"]
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
    selector = ("--pod-selector", GROUPS)
    try:
        check_disturbance(fleet, undisturbed, lambda: fleet.cluster.kubectl("drain", node, *flags, *selector))
        assert not [pod for pod in fleet.pods().values() if pod["spec"]["nodeName"] == node]
        assert fleet.num_moves() > moves_before
    finally:
        fleet.cluster.kubectl("uncordon", node)
    fleet.wait_ready(3)


def test_scaled_in_to_one_while_the_operator_is_killed(fleet: Fleet, undisturbed: list[StreamResult], operator: str) -> None:
    moves_before = fleet.num_moves()
    delete = ("-n", operator, "delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", "--grace-period=0", "--force")

    def action() -> None:
        started_s = time.monotonic()
        fleet.kubectl("scale", "infsvc", "chat", "--replicas=1")
        fleet.cluster.kubectl(*delete)
        svc.wait_for(lambda: len(fleet.groups()) == 1, 240, "one group remains")
        print(f"two of three loaded groups were deleted after {time.monotonic() - started_s:.1f} s")

    check_disturbance(fleet, undisturbed, action)
    assert fleet.num_moves() > moves_before
    fleet.cluster.kubectl("-n", operator, "rollout", "status", "deployment/phalanx-operator", "--timeout=120s")
    fleet.wait_ready(1)
    fleet.kubectl("scale", "infsvc", "chat", "--replicas=3")
    fleet.wait_ready(3)


def test_loaded_group_is_empty_ten_seconds_after_scale_in(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    moves_before, moves = fleet.num_moves(), [(0.0, 0.0)]

    def action() -> None:
        started_s = time.monotonic()
        fleet.kubectl("scale", "infsvc", "chat", "--replicas=2")

        def is_deleted() -> bool:
            if (count := fleet.num_moves()) > max(moves_before, moves[-1][1]):
                moves.append((time.monotonic() - started_s, count))
            return len(fleet.groups()) == 2

        svc.wait_for(is_deleted, 120, "the group is deleted")
        moves.append((time.monotonic() - started_s, fleet.num_moves()))

    check_disturbance(fleet, undisturbed, action)
    assert moves[-1][1] > moves_before
    print(f"scale-in of a loaded group: last move after {moves[-2][0]:.1f} s, deleted after {moves[-1][0]:.1f} s")
    fleet.kubectl("scale", "infsvc", "chat", "--replicas=3")
    fleet.wait_ready(3)


def test_a_rollout_that_keeps_the_weights(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    before, moves_before = set(fleet.groups()), fleet.num_moves()
    manifest = fleet.manifest(tiny_model.NAME)
    manifest["spec"]["podTemplate"]["metadata"] = {"annotations": {"example.com/round": "2"}}
    check_disturbance(fleet, undisturbed, lambda: fleet.apply(manifest))
    assert fleet.num_moves() > moves_before
    fleet.wait_ready(3)
    assert not before & set(fleet.groups())


def test_a_rollout_that_changes_the_weights(fleet: Fleet, undisturbed: list[StreamResult]) -> None:
    before = set(fleet.groups())
    check_disturbance(fleet, undisturbed, lambda: fleet.apply(fleet.manifest(tiny_model.OTHER)))
    fleet.wait_ready(3)
    assert not before & set(fleet.groups())
    results = Streams(fleet.url, bodies()).run()
    assert [result.error for result in results] == [None] * NUM_STREAMS
    assert all(result.tokens != former.tokens for result, former in zip(results, undisturbed, strict=True))
