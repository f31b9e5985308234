"""Simulated nodes act like kubelets, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from bench.control_scale.nodes import FakeNodes
from phalanx_operator.kube.client import PODS, Gone
from phalanx_operator.kube.http import HttpKube
from phalanx_operator.metrics import CountingKube, Metrics
from tests.control.fake_api import FakeApi
from tests.polling import until


@pytest.fixture
async def server() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    await api.start()
    yield api
    await api.stop()


async def test_pods_on_fake_nodes_start_and_stop_at_once(server: FakeApi) -> None:
    async with ApiClient(Configuration(host=server.url)) as client:
        nodes = FakeNodes(HttpKube(client), 2, "10.0.0.9", "")
        await nodes.create()
        assert set(server.of("nodes")) == set(server.of("leases")) == {"fake-0", "fake-1"}
        assert server.of("nodes")["fake-0"]["status"]["conditions"][0]["type"] == "Ready"
        task = asyncio.create_task(nodes.run())
        try:
            spec = {"nodeName": "fake-1", "containers": [{"name": "c", "image": "i"}]}
            pod = {"metadata": {"name": "p", "namespace": "ns"}, "spec": spec, "status": {"phase": "Pending"}}
            server.put("pods", pod)
            server.put("pods", pod | {"metadata": {"name": "real", "namespace": "ns"}, "spec": spec | {"nodeName": "node1"}})
            await until(lambda: nodes.started)
            status = server.of("pods")["p"]["status"]
            assert (status["phase"], status["podIP"], len(nodes.started)) == ("Running", "10.0.0.9", 1)
            assert server.of("pods")["real"]["status"] == {"phase": "Pending"}
            current = server.of("pods")["p"]
            server.put("pods", current | {"metadata": current["metadata"] | {"deletionTimestamp": "now"}})
            await until(lambda: "p" not in server.of("pods"))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await nodes.remove()
        assert server.of("nodes") == server.of("leases") == {}


async def test_calls_and_their_errors_are_counted_by_verb(server: FakeApi) -> None:
    metrics = Metrics()
    async with ApiClient(Configuration(host=server.url)) as client:
        kube = CountingKube(HttpKube(client), metrics)
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}}
        await kube.create(PODS, body)
        await kube.apply(PODS, body, subresource="status")
        await kube.merge(PODS, "ns", "p", {"metadata": {}})
        await kube.replace(PODS, await kube.get(PODS, "ns", "p"))
        await kube.list_page(PODS, "ns", "", "")
        async for event in kube.watch(PODS, None, "", "0"):
            assert event["object"]["metadata"]["name"] == "p"
            break
        await kube.delete(PODS, "ns", "p", "")
        with pytest.raises(Gone):
            await kube.get(PODS, "ns", "p")
    calls = {
        (s.labels["verb"], s.labels["kind"]): s.value
        for s in next(iter(metrics.api_calls.collect())).samples
        if s.name.endswith("_total")
    }
    verbs = {("create", "pods"): 1, ("patch", "pods"): 1, ("patch", "pods/status"): 1, ("update", "pods"): 1, ("list", "pods"): 1}
    assert calls == verbs | {("watch", "pods"): 1, ("delete", "pods"): 1, ("get", "pods"): 2}
    (error,) = [s for s in next(iter(metrics.api_errors.collect())).samples if s.name.endswith("_total")]
    assert (error.labels, error.value) == ({"verb": "get", "kind": "pods", "error": "Gone"}, 1)
