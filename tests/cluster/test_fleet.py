"""Streams of real clients outlive what happens to groups: 64 streams on three groups of TP 2, struck when all are half-way.

The scenarios share one service of a tiny model and run in order; each leaves it Ready with three groups. Every stream is whole,
has each token once, and equals the undisturbed run, greedy and seeded; the router answered no 5xx.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.cluster import killing, tiny_model
from tests.cluster import service as svc
from tests.cluster.clients import LAST, Streams, Told
from tests.cluster.fixtures import Cluster
from tests.cluster.test_path import Chat

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NUM_STREAMS, TOKENS = 64, 600
FADED_S = 40
"""All groups share the processors of one machine, so whichever ran beside others was slow; routers forget it while it is idle,
and the next streams go to all groups alike."""
GROUPS, ROUTER = "phalanx.dev/component=group", "phalanx.dev/component=router"
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
        """Three groups whose two pods may lie on one node, so that either node can be drained."""
        made = svc.manifest("chat", model=f"pvc://models/{model}", replicas=3, servedNames=["tiny"], **spec)
        del made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
        made["spec"]["engine"] |= {"kvCacheMemory": "64Mi", "maxModelLen": 2048}
        return self.cluster.with_site_packages(made)

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def replays(self) -> float:
        """Streams that went on in another group from what the router knew of them."""
        return self.router_metric("phalanx_router_replays_total")

    def responses(self) -> dict[str, float]:
        """The router's own count of its answers, by status."""
        page = httpx.get(f"{self.url}/metrics", timeout=10).text
        found: dict[str, float] = {}
        for line in page.splitlines():
            if line.startswith("phalanx_router_http_responses_total{"):
                status = line.partition('status="')[2].partition('"')[0]
                found[status] = found.get(status, 0.0) + float(line.rpartition(" ")[2])
        return found


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, operator: str, namespace: str) -> Iterator[Fleet]:
    """The service, Ready with three groups."""
    cluster.claim(namespace, "models", tiny_model.folder())
    made = Fleet(cluster, namespace)
    made.apply(made.manifest(tiny_model.NAME))
    made.wait_ready(3)
    yield made
    made.kubectl("delete", "infsvc", "chat")


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[Told]:
    """What the streams say when nothing happens."""
    told = Streams(fleet.url, bodies()).run()
    assert [(one.error, one.finish, one.usage, len(one.tokens)) for one in told] == [
        (None, "length", TOKENS, TOKENS)
    ] * NUM_STREAMS
    return told


def bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half seeded."""
    fixed: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    drawn = [{"temperature": 0.0}, {"temperature": 1.0}]
    return [{**fixed, **drawn[i % 2], "prompt": f"stream number {i} begins", "seed": 100 + i} for i in range(NUM_STREAMS)]


def assert_whole(told: list[Told]) -> None:
    assert [one.error for one in told] == [None] * NUM_STREAMS
    assert [(one.finish, one.usage, len(one.tokens)) for one in told] == [("length", TOKENS, TOKENS)] * NUM_STREAMS


def outlive(fleet: Fleet, undisturbed: list[Told], act: Callable[[], object]) -> None:
    """Runs the streams, acts when all are between a quarter and three, and compares."""
    time.sleep(FADED_S)
    streams = Streams(fleet.url, bodies(), act)
    told = streams.run()
    assert streams.spread is not None and streams.spread[1] <= LAST, streams.spread
    assert_whole(told)
    different = [i for i, (one, other) in enumerate(zip(told, undisturbed, strict=True)) if one.tokens != other.tokens]
    assert not different, f"{len(different)} streams differ: {different}"


def strike(fleet: Fleet, undisturbed: list[Told], act: Callable[[], object]) -> None:
    """The same, and by its own count the router answered nothing but 200."""
    before = fleet.responses()
    outlive(fleet, undisturbed, act)
    after = fleet.responses()
    assert {status for status, count in after.items() if count > before.get(status, 0.0)} == {"200"}


@pytest.mark.parametrize("pod", ["0", "1"], ids=["leader", "worker"])
def test_a_pod_killed(fleet: Fleet, undisturbed: list[Told], pod: str) -> None:
    """Its programs have no moment left, so nothing moves."""
    replays = fleet.replays()
    strike(fleet, undisturbed, lambda: killing.kill(fleet.cluster, fleet.namespace, f"{fleet.busiest()}-{pod}", "phalanx"))
    assert fleet.replays() > replays
    fleet.wait_ready(3)


@pytest.mark.parametrize("pod", ["0", "1"], ids=["leader", "worker"])
def test_a_pod_deleted_at_once(fleet: Fleet, undisturbed: list[Told], pod: str) -> None:
    """It still hears that it is to end, and has a second or two."""
    over = fleet.taken_over()
    delete = ("--grace-period=0", "--force", "--wait=false")
    strike(fleet, undisturbed, lambda: fleet.kubectl("delete", "pod", f"{fleet.busiest()}-{pod}", *delete))
    assert fleet.taken_over() > over
    fleet.wait_ready(3)


def test_a_rank_stopped(fleet: Fleet, undisturbed: list[Told]) -> None:
    replays = fleet.replays()
    stop = ("-c", "runtime", "--", "python3", "-c", STOP_A_RANK)
    strike(fleet, undisturbed, lambda: fleet.kubectl("exec", f"{fleet.busiest()}-1", *stop))
    assert fleet.replays() > replays
    fleet.wait_ready(3)


def test_deleted_router_serves_its_streams_to_the_end(fleet: Fleet, undisturbed: list[Told]) -> None:
    """It is the only one; its successor has the next request."""
    (former,) = fleet.pods(ROUTER)
    outlive(fleet, undisturbed, lambda: fleet.kubectl("delete", "pod", former, "--wait=false"))
    svc.wait_for(lambda: former not in fleet.pods(ROUTER), 60, "nothing holds it any longer")
    fleet.wait_ready(3)


def test_a_statefulset_deleted(fleet: Fleet, undisturbed: list[Told]) -> None:
    moved = fleet.moved()
    strike(fleet, undisturbed, lambda: fleet.kubectl("delete", "statefulset", fleet.busiest(), "--wait=false"))
    assert fleet.moved() > moved
    fleet.wait_ready(3)


def test_a_node_drained(fleet: Fleet, undisturbed: list[Told]) -> None:
    moved, node = fleet.moved(), fleet.pods()[f"{fleet.groups()[0]}-0"]["spec"]["nodeName"]
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
    ours = ("--pod-selector", GROUPS)  # the rest of the cluster stays where it is
    try:
        strike(fleet, undisturbed, lambda: fleet.cluster.kubectl("drain", node, *flags, *ours))
        assert not [pod for pod in fleet.pods().values() if pod["spec"]["nodeName"] == node]
        assert fleet.moved() > moved
    finally:
        fleet.cluster.kubectl("uncordon", node)
    fleet.wait_ready(3)


def test_scaled_in_to_one_while_the_operator_is_killed(fleet: Fleet, undisturbed: list[Told], operator: str) -> None:
    moved = fleet.moved()
    delete = ("-n", operator, "delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", "--grace-period=0", "--force")

    def act() -> None:
        began = time.monotonic()
        fleet.kubectl("scale", "infsvc", "chat", "--replicas=1")
        fleet.cluster.kubectl(*delete)
        svc.wait_for(lambda: len(fleet.groups()) == 1, 240, "one group is left")
        print(f"two of three loaded groups were empty and gone after {time.monotonic() - began:.1f} s")

    strike(fleet, undisturbed, act)
    assert fleet.moved() > moved
    fleet.cluster.kubectl("-n", operator, "rollout", "status", "deployment/phalanx-operator", "--timeout=120s")
    fleet.wait_ready(1)
    fleet.kubectl("scale", "infsvc", "chat", "--replicas=3")
    fleet.wait_ready(3)


def test_loaded_group_is_empty_ten_seconds_after_scale_in(fleet: Fleet, undisturbed: list[Told]) -> None:
    moved, moves = fleet.moved(), [(0.0, 0.0)]

    def act() -> None:
        began = time.monotonic()
        fleet.kubectl("scale", "infsvc", "chat", "--replicas=2")

        def gone() -> bool:
            if (count := fleet.moved()) > max(moved, moves[-1][1]):
                moves.append((time.monotonic() - began, count))
            return len(fleet.groups()) == 2

        svc.wait_for(gone, 120, "the group goes")
        moves.append((time.monotonic() - began, fleet.moved()))

    strike(fleet, undisturbed, act)
    assert moves[-1][1] > moved
    print(f"scale-in of a loaded group: last move after {moves[-2][0]:.1f} s, gone after {moves[-1][0]:.1f} s")
    fleet.kubectl("scale", "infsvc", "chat", "--replicas=3")
    fleet.wait_ready(3)


def test_a_rollout_that_keeps_the_weights(fleet: Fleet, undisturbed: list[Told]) -> None:
    before, moved = set(fleet.groups()), fleet.moved()
    manifest = fleet.manifest(tiny_model.NAME)
    manifest["spec"]["podTemplate"]["metadata"] = {"annotations": {"example.com/round": "2"}}
    strike(fleet, undisturbed, lambda: fleet.apply(manifest))
    assert fleet.moved() > moved
    fleet.wait_ready(3)
    assert not before & set(fleet.groups())


def test_a_rollout_that_changes_the_weights(fleet: Fleet, undisturbed: list[Told]) -> None:
    before = set(fleet.groups())
    strike(fleet, undisturbed, lambda: fleet.apply(fleet.manifest(tiny_model.OTHER)))
    fleet.wait_ready(3)
    assert not before & set(fleet.groups())
    told = Streams(fleet.url, bodies()).run()
    assert [one.error for one in told] == [None] * NUM_STREAMS
    assert all(one.tokens != other.tokens for one, other in zip(told, undisturbed, strict=True))
