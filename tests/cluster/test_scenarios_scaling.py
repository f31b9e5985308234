"""S35, S36, S37: scaling to zero and back, through a restart of the operator, and without reports."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from tests.cluster import service as svc
from tests.cluster.scenes import Scene, Traffic
from tests.cluster.watching import always

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CALM_S, OUTAGE_S = 120.0, 40.0
ZERO = {
    "minReplicas": 0,
    "maxReplicas": 1,
    "targets": {"kvUtilization": 80},
    "scaleToZero": {"enabled": True, "idleSeconds": 20},
}
ELASTIC = {"minReplicas": 1, "maxReplicas": 3, "targets": {"kvUtilization": 10}, "scaleDown": {"stabilizationSeconds": 30}}
WORKERS, TOKENS = 8, 300
"""The load needs more than a tenth of the pages of three groups with SMALL."""
SMALL = {"kvCacheMemory": "4Mi"}


def replicas(scene: Scene) -> int:
    return int(scene.get("infsvc", "chat")["spec"]["replicas"])


def start_requests(scene: Scene, count: int) -> "Future[list[svc.Answer]]":
    """Starts requests in a thread."""
    bodies = [{"model": "tiny", "prompt": f"wake {i}", "max_tokens": 16, "ignore_eos": True} for i in range(count)]
    future: Future[list[svc.Answer]] = Future()
    url = scene.url
    threading.Thread(target=lambda: future.set_result(asyncio.run(svc.stream_all(url, bodies)))).start()
    return future


def test_s35_one_request_wakes_the_service_and_is_answered(scene: Scene) -> None:
    scene.apply(scene.manifest(replicas=0, pods=1, autoscaling=ZERO))
    svc.wait_for(lambda: scene.condition("Ready") == ("True", "ScaledToZero"), 180, "a router without groups")
    with always(lambda: "" if replicas(scene) <= 1 and len(scene.sets()) <= 1 else "above the maximum") as errors:
        first = start_requests(scene, 1)
        svc.wait_for(lambda: replicas(scene) == 1, 30, "the first request adds a group")
        more = start_requests(scene, 3)
        answers = first.result(180) + more.result(180)
        assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", 16)] * 4
        svc.wait_for(lambda: replicas(scene) == 0, 180, "without load, no group remains")
    assert errors == []
    svc.wait_for(lambda: not scene.pods(), 120, "no pod of a group remains")
    scene.delete_service()


@pytest.fixture(scope="module")
def elastic(scene: Scene) -> Iterator[Scene]:
    """Three groups; one is removed after half a minute of low load."""
    scene.delete_service()
    scene.apply(scene.manifest(replicas=3, pods=1, autoscaling=ELASTIC, engine=SMALL))
    scene.wait_ready(3, 400)
    yield scene
    scene.delete_service()


@contextmanager
def loaded(scene: Scene) -> Iterator[Traffic]:
    """A load that needs three groups, which are ready."""
    with scene.traffic(WORKERS, TOKENS) as traffic:
        svc.wait_for(lambda: replicas(scene) == 3 and scene.is_ready(3), 400, "the load has three groups")
        yield traffic


def test_s36_operator_restart_keeps_count_under_constant_load(elastic: Scene) -> None:
    """Without the load, a group is removed."""
    assert [a.error for a in start_requests(elastic, 3).result(120)] == [None] * 3, "groups measure their steps"
    svc.wait_for(lambda: replicas(elastic) < 3, 300, "without load, a group is removed")
    counts: set[int] = set()

    def check() -> str:
        counts.add(replicas(elastic))
        return ""

    with loaded(elastic) as traffic, always(check):
        elastic.restart_operator()
        time.sleep(CALM_S)
    assert counts == {3}
    assert traffic.failed == [] and len(elastic.ready_groups()) == 3


def test_s37_silent_routers_hold_the_count_with_a_condition(elastic: Scene) -> None:
    """Routers reject a wrong token of the operator. An autoscaler that reads silence as no load would remove a group."""
    secret = elastic.get("secret", "chat-token")["data"]["token"]
    other = base64.b64encode(b"0" * 64).decode()

    def set_token(value: str) -> None:
        elastic.kubectl("patch", "secret", "chat-token", "--type=merge", "-p", json.dumps({"data": {"token": value}}))

    with loaded(elastic) as traffic:
        svc.wait_for(lambda: elastic.condition("ScalingActive")[0] == "True", 60, "the autoscaler acts")
        with always(lambda: "" if replicas(elastic) == 3 else "another count") as errors:
            set_token(other)
            try:
                elastic.restart_operator()  # it reads the token again
                reason = ("False", "MetricsUnavailable")
                svc.wait_for(lambda: elastic.condition("ScalingActive") == reason, 120, "no router answers the operator")
                elastic.patch({"autoscaling": {"scaleDown": {"stabilizationSeconds": 0}}})
                time.sleep(OUTAGE_S)
                assert elastic.condition("ScalingActive") == reason
                assert elastic.condition("Available") == ("True", "Serving")
            finally:
                set_token(secret)
            svc.wait_for(lambda: elastic.condition("ScalingActive")[0] == "True", 120, "routers answer again")
        assert errors == []
    assert traffic.failed == [], "clients are not affected"
