"""A service scales from zero to two groups and back by real requests, and a loaded group scales in.

The tests share the service and run in order. A few streams need a second group.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.chat import Chat
from tests.cluster.fixtures import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NAME = "elastic"
SCALING = {
    "minReplicas": 0,
    "maxReplicas": 2,
    "targets": {"kvUtilization": 10},
    "scaleToZero": {"enabled": True, "idleSeconds": 30},
}


class ElasticService(Chat):
    """The service under test."""

    @property
    def url(self) -> str:
        return f"http://{self.kubectl('get', 'service', NAME, '-o', 'jsonpath={.spec.clusterIP}')}"

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("infsvc", NAME)
        return body

    @property
    def replicas(self) -> int:
        return int(self.body["spec"]["replicas"])

    def sets(self) -> list[dict[str, Any]]:
        return list(self.get("statefulsets", "-l", f"phalanx.dev/service={NAME}")["items"])

    def condition(self, kind: str) -> tuple[str, str]:
        conditions = {c["type"]: (c["status"], c["reason"]) for c in self.body.get("status", {}).get("conditions", [])}
        return conditions.get(kind, ("", ""))


@pytest.fixture(scope="module")
def elastic(cluster: Cluster, operator: str, real_model: str, namespace: str) -> Iterator[ElasticService]:
    """The service without groups."""
    service = ElasticService(cluster, namespace)
    manifest = svc.manifest(NAME, model=real_model, replicas=0, servedNames=["smollm2"], autoscaling=SCALING)
    manifest["spec"]["engine"] |= {"kvCacheMemory": "64Mi"}
    service.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    svc.wait_for(lambda: service.condition("Ready") == ("True", "ScaledToZero"), 180, "a router without groups")
    yield service
    service.kubectl("delete", "infsvc", NAME)


def start_streams(elastic: ElasticService, count: int, tokens: int) -> "Future[list[svc.Answer]]":
    """Starts streams in a thread."""
    fixed = {"model": "smollm2", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    bodies = [{**fixed, "prompt": f"Story number {i}: once upon a time"} for i in range(count)]
    future: Future[list[svc.Answer]] = Future()
    url = elastic.url
    threading.Thread(target=lambda: future.set_result(asyncio.run(svc.stream_all(url, bodies)))).start()
    return future


def assert_complete(answers: list[svc.Answer], tokens: int) -> None:
    assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", tokens)] * len(answers)


def test_service_scales_from_zero_to_two_and_back(elastic: ElasticService) -> None:
    first = start_streams(elastic, 1, 8)
    svc.wait_for(lambda: elastic.replicas == 1, 30, "the first request wakes the service")
    assert_complete(first.result(180), 8)
    many = start_streams(elastic, 6, 400)
    svc.wait_for(lambda: elastic.replicas == 2, 90, "six streams need a second group")
    assert elastic.condition("ScalingActive") == ("True", "Active")
    assert_complete(many.result(300), 400)
    svc.wait_for(lambda: elastic.replicas == 0, 180, "an idle service keeps no group")
    svc.wait_for(lambda: not elastic.pods(), 90, "no pod of a group remains")
    assert elastic.condition("Ready") == ("True", "ScaledToZero")


def test_condition_reports_another_writer_of_replicas(elastic: ElasticService) -> None:
    elastic.kubectl("scale", "infsvc", NAME, "--replicas=2")
    svc.wait_for(lambda: elastic.condition("ScalingActive") == ("False", "ConflictingScaler"), 30, "another writer is reported")
    assert elastic.replicas == 2


def test_loaded_group_scales_in_without_a_lost_token(elastic: ElasticService) -> None:
    elastic.kubectl("patch", "infsvc", NAME, "--type=merge", "-p", '{"spec": {"autoscaling": null}}')
    svc.wait_for(lambda: elastic.condition("Ready") == ("True", "Ready") and len(elastic.groups()) == 2, 240, "two groups")
    running = start_streams(elastic, 8, 400)
    svc.wait_for(lambda: elastic.router_metric("phalanx_router_streams") >= 8, 60, "all streams run")
    started_s = time.monotonic()
    elastic.kubectl("scale", "infsvc", NAME, "--replicas=1")
    svc.wait_for(
        lambda: len([s for s in elastic.sets() if "deletionTimestamp" not in s["metadata"]]) == 1, 120, "a group is deleted"
    )
    print(f"evacuated and deleted after {time.monotonic() - started_s:.1f} s")
    assert_complete(running.result(300), 400)
    assert elastic.router_metric("phalanx_router_moves_total") > 0
