"""S35, S36, S37: the number of groups from zero and back, over a restart of the operator, and while nothing is known."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.cluster import service as svc
from tests.cluster.scenes import Scene
from tests.cluster.watching import always

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CALM_S, OUTAGE_S = 120.0, 40.0
ZERO = {
    "minReplicas": 0,
    "maxReplicas": 1,
    "targets": {"kvUtilization": 80},
    "scaleToZero": {"enabled": True, "idleSeconds": 20},
}
STEADY = {"minReplicas": 1, "maxReplicas": 3, "targets": {"kvUtilization": 80}, "scaleDown": {"stabilizationSeconds": 600}}


def replicas(scene: Scene) -> int:
    return int(scene.get("infsvc", "chat")["spec"]["replicas"])


def asked(scene: Scene, count: int) -> "Future[list[svc.Answer]]":
    """So many streams, in a thread of their own."""
    bodies = [{"model": "tiny", "prompt": f"wake {i}", "max_tokens": 16, "ignore_eos": True} for i in range(count)]
    future: Future[list[svc.Answer]] = Future()
    url = scene.url
    threading.Thread(target=lambda: future.set_result(asyncio.run(svc.stream_all(url, bodies)))).start()
    return future


def test_s35_one_request_wakes_the_service_and_is_held_until_it_is_answered(scene: Scene) -> None:
    scene.apply(scene.manifest(replicas=0, pods=1, autoscaling=ZERO))
    svc.wait_for(lambda: scene.condition("Ready") == ("True", "ScaledToZero"), 180, "a router, and no group")
    with always(lambda: "" if replicas(scene) <= 1 else "above the maximum") as wrong:
        first = asked(scene, 1)
        svc.wait_for(lambda: replicas(scene) == 1, 30, "the first request wakes it")
        more = asked(scene, 3)
        answers = first.result(180) + more.result(180)
        assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", 16)] * 4
        svc.wait_for(lambda: replicas(scene) == 0, 180, "idle, it keeps no group")
    assert wrong == []
    svc.wait_for(lambda: not scene.pods(), 120, "no pod of a group is left")
    scene.gone()


@pytest.fixture(scope="module")
def steady(scene: Scene) -> Iterator[Scene]:
    """Three groups that the autoscaler leaves alone."""
    scene.gone()
    scene.apply(scene.manifest(replicas=3, pods=1, autoscaling=STEADY))
    scene.wait_ready(3, 400)
    yield scene
    scene.gone()


def test_s36_a_restart_of_the_operator_changes_no_count_under_a_constant_load(steady: Scene) -> None:
    counts: set[int] = set()

    def look() -> str:
        counts.add(replicas(steady))
        return ""

    with steady.traffic() as traffic, always(look):
        steady.restart_operator()
        time.sleep(CALM_S)
    assert counts == {3}
    assert traffic.failed == [] and len(steady.ready_groups()) == 3


def test_s37_while_no_router_is_heard_the_count_is_held_and_that_is_said(steady: Scene) -> None:
    """The operator proves itself with the token of the service: with another one routers do not answer it."""
    secret = steady.get("secret", "chat-token")["data"]["token"]
    other = base64.b64encode(b"0" * 64).decode()

    def set_token(value: str) -> None:
        steady.kubectl("patch", "secret", "chat-token", "--type=merge", "-p", json.dumps({"data": {"token": value}}))

    svc.wait_for(lambda: steady.condition("ScalingActive")[0] == "True", 360, "the autoscaler acts")
    set_token(other)
    try:
        steady.restart_operator()  # it reads the token anew
        reason = ("False", "MetricsUnavailable")
        svc.wait_for(lambda: steady.condition("ScalingActive") == reason, 120, "no router answers the operator")
        with always(lambda: "" if replicas(steady) == 3 else "another count") as wrong:
            time.sleep(OUTAGE_S)
        assert wrong == []
        assert steady.condition("Available") == ("True", "Serving"), "clients notice nothing"
    finally:
        set_token(secret)
    svc.wait_for(lambda: steady.condition("ScalingActive")[0] == "True", 120, "the routers are heard again")
