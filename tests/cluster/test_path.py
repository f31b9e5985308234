"""The whole path on a real cluster with a real model: apply, serve, scale, lose a pod, lose the operator, delete.

The tests share one service and run in order; each leaves it Ready with two groups of TP 2 over two nodes.
"""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from bench.frame.equality import compare
from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tests.cluster.reference import PROMPTS, Reference, greedy
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tools.errors import Failed

pytestmark = pytest.mark.cluster
MAX_TOKENS = 40
LONG = 240
GROUPS = "phalanx.dev/component=group"


@dataclass(frozen=True, slots=True)
class Chat:
    """The service under test."""

    cluster: Cluster
    namespace: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *args, stdin=stdin)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def pods(self, selector: str = GROUPS) -> dict[str, dict[str, Any]]:
        return {p["metadata"]["name"]: p for p in self.get("pods", "-l", selector)["items"]}

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def restarts(self) -> int:
        return sum(c["restartCount"] for pod in self.pods().values() for c in pod["status"].get("containerStatuses", []))

    def groups(self) -> list[str]:
        return sorted(s["metadata"]["name"] for s in self.get("statefulsets")["items"])

    @property
    def url(self) -> str:
        return self.address("chat")

    def address(self, service: str) -> str:
        """Where the routers of a service answer."""
        return f"http://{self.kubectl('get', 'service', service, '-o', 'jsonpath={.spec.clusterIP}')}"

    def router_metric(self, name: str) -> float:
        return svc.metric(httpx.get(f"{self.url}/metrics", timeout=10).text, name)

    def busiest(self) -> str:
        """The group that runs most requests now, by its leader's metrics."""
        leaders = [name for name in self.pods() if name.endswith("-0")]
        return max((name.removesuffix("-0") for name in leaders), key=self.running)

    def running(self, group: str) -> float:
        """Requests that a group runs now, by its leader's metrics."""
        leader = self.get("pod", f"{group}-0")["status"]["podIP"]
        return svc.metric(httpx.get(f"http://{leader}:8000/metrics", timeout=10).text, "vllm:num_requests_running")

    def moved(self) -> float:
        return self.router_metric("phalanx_router_moves_total")

    def taken_over(self) -> float:
        """Streams that went on in another group: replayed there, or moved by a group that still had a moment."""
        return self.moved() + self.router_metric("phalanx_router_replays_total")

    def is_ready(self, groups: int) -> bool:
        service = self.get("infsvc", "chat")
        status = service.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        counts = (status.get("replicas"), status.get("readyReplicas"), len(self.groups()))
        current = status.get("observedGeneration") == service["metadata"]["generation"]
        return current and conditions.get("Ready") == "True" and counts == (groups, groups, groups)

    def wait_ready(self, groups: int, limit_s: float = 300) -> None:
        """Ready with that many groups, by the status and by the router's own count."""
        try:
            svc.wait_for(lambda: self.is_ready(groups), limit_s, f"{groups} ready groups")
            svc.wait_for(
                lambda: self.router_metric("phalanx_router_groups_ready") == groups, 60, f"{groups} groups at the router"
            )
        except TimeoutError as late:
            shown = self.kubectl("get", "infsvc,statefulsets,pods", "-o", "wide")
            status = json.dumps(self.get("infsvc", "chat").get("status"), indent=1)
            logs = self.kubectl("logs", "-l", GROUPS, "--tail=15", "--prefix", "--ignore-errors")
            raise TimeoutError(f"{late}\n{shown}\n{status}\n{logs}") from None


@pytest.fixture(scope="module")
def expected(real_model_dir: Path) -> list[Reference]:
    """Made before the service, which needs the processors itself."""
    return greedy(real_model_dir, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def deployed(expected: list[Reference], cluster: Cluster, operator: str, real_model: str, namespace: str) -> Iterator[Chat]:
    """The service, Ready."""
    service = Chat(cluster, namespace)
    manifest = svc.manifest("chat", model=real_model, replicas=2, servedNames=["smollm2"])
    service.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    service.wait_ready(2)
    yield service


@pytest.fixture(scope="module")
def assert_equal(expected: list[Reference], real_model_dir: Path) -> Callable[[list[svc.Answer]], None]:
    """Fails unless the answers to the first prompts are what `transformers` generates, near-ties aside."""
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))

    def check(answers: list[svc.Answer]) -> None:
        assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", MAX_TOKENS)] * len(answers)
        references = expected[: len(answers)]
        verdict = compare(
            tokenizer,
            [a.text for a in answers],
            [r.tokens for r in references],
            lambda stream, index: references[stream].gaps[index],
        )
        assert verdict.holds, verdict
        print(f"{len(answers)} streams equal, {verdict.num_compared} tokens compared, {verdict.num_near_ties} near-ties")

    return check


def bodies(references: list[Reference]) -> list[dict[str, Any]]:
    fixed = {"model": "smollm2", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return [{**fixed, "prompt": reference.prompt} for reference in references]


class Once:
    """Runs an action in a thread of its own once enough chunks have come."""

    def __init__(self, chunks: int, action: Callable[[], object]) -> None:
        self._chunks = chunks
        self._action = action
        self._thread: threading.Thread | None = None

    def __call__(self, chunks: int) -> None:
        if chunks >= self._chunks and self._thread is None:
            self._thread = threading.Thread(target=self._action)
            self._thread.start()

    def join(self) -> None:
        assert self._thread is not None, "the streams ended before anything was done to them"
        self._thread.join()


def test_two_groups_span_both_nodes(deployed: Chat) -> None:
    nodes: dict[str, set[str]] = {}
    for pod in deployed.pods().values():
        nodes.setdefault(pod["metadata"]["labels"]["phalanx.dev/group"], set()).add(pod["spec"]["nodeName"])
    assert sorted(nodes) == deployed.groups()
    assert [len(names) for names in nodes.values()] == [2, 2]


def test_pods_compute_with_the_kernels_that_their_image_brings(deployed: Chat) -> None:
    for name in deployed.pods():
        logs = deployed.kubectl("logs", name)
        if shutil.which("g++") is None and deployed.cluster.files is not None:
            assert "no compiled kernels" in logs, "this machine had no compiler for the image"
        else:
            assert re.search(r"compiled kernels: (x86-64-v|armv8-a).*, of the image", logs), logs[:2000]


def test_sixteen_streams_equal_transformers(
    deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None]
) -> None:
    assert_equal(asyncio.run(svc.stream_all(deployed.url, bodies(expected))))


def test_a_seeded_stream_is_the_same_twice(deployed: Chat) -> None:
    body = {"model": "smollm2", "prompt": "The sky is", "max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    one, two = asyncio.run(svc.stream_all(deployed.url, [body, body]))
    assert (one.error, one.usage) == (None, 24)
    assert one.text == two.text


def test_a_deleted_pod_loses_and_doubles_no_token(
    deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None]
) -> None:
    before, broken = deployed.uids(), ""
    longer = [{**body, "max_tokens": LONG} for body in bodies(expected[:8])]  # a deleted pod has two seconds, whatever is asked
    undisturbed = asyncio.run(svc.stream_all(deployed.url, longer))
    over = deployed.taken_over()

    def kill() -> None:
        nonlocal broken
        broken = deployed.busiest()
        deployed.kubectl("delete", "pod", f"{broken}-1", "--wait=false", "--grace-period=1")

    killer = Once(8, kill)
    answers = asyncio.run(svc.stream_all(deployed.url, longer, killer))
    killer.join()
    assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", LONG)] * len(answers)
    assert [a.text for a in answers] == [a.text for a in undisturbed]
    assert deployed.taken_over() > over
    svc.wait_for(
        lambda: deployed.uids().get(f"{broken}-1", before[f"{broken}-1"]) != before[f"{broken}-1"], 90, "the pod is back"
    )
    deployed.wait_ready(2)
    after = deployed.uids()
    assert {name for name in before if after.get(name) != before[name]} == {f"{broken}-1"}
    assert deployed.restarts() == 0
    assert_equal(asyncio.run(svc.stream_all(deployed.url, bodies(expected[:8]))))


def test_killed_operator_changes_no_pod_and_breaks_no_stream(
    deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None], operator: str
) -> None:
    before = deployed.uids()
    delete = ("-n", operator, "delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", "--grace-period=0", "--force")
    killer = Once(3, lambda: deployed.cluster.kubectl(*delete))
    answers = asyncio.run(svc.stream_all(deployed.url, bodies(expected[:4]), killer))
    killer.join()
    assert_equal(answers)
    deployed.cluster.kubectl("-n", operator, "rollout", "status", "deployment/phalanx-operator", "--timeout=120s")
    deployed.wait_ready(2)
    assert deployed.uids() == before
    assert deployed.restarts() == 0


@pytest.fixture(scope="module")
def target(deployed: Chat) -> Target:
    return Target(deployed.url, "smollm2", long_tokens=400, metrics_prefix="phalanx_router")


class TestOpenAI(OpenAISuite):
    """The suite of the OpenAI client, through the router of a real cluster."""


def test_scales_up_and_down(deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None]) -> None:
    before = deployed.uids()
    deployed.kubectl("scale", "infsvc", "chat", "--replicas=3")
    deployed.wait_ready(3)
    assert {name: uid for name, uid in deployed.uids().items() if name in before} == before
    deployed.kubectl("scale", "infsvc", "chat", "--replicas=1")
    deployed.wait_ready(1)
    assert_equal(asyncio.run(svc.stream_all(deployed.url, bodies(expected[:2]))))
    deployed.kubectl("scale", "infsvc", "chat", "--replicas=2")
    deployed.wait_ready(2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"parallelism": {"tensor": 3, "gpusPerPod": 2}}, "gpusPerPod"),
        ({"parallelism": {"tensor": 65}}, "spec.parallelism.tensor"),
        ({"model": {"uri": "ftp://somewhere"}}, "spec.model.uri"),
        ({"replicas": -1}, "spec.replicas"),
        ({"noSuchField": 1}, "noSuchField"),
    ],
    ids=["gpusPerPod", "tensor", "uri", "replicas", "unknown"],
)
def test_an_impossible_manifest_is_refused_naming_the_field(deployed: Chat, changes: dict[str, Any], field: str) -> None:
    manifest = svc.manifest("bad", model="hf://org/name", replicas=1)
    manifest["spec"] |= changes
    with pytest.raises(Failed, match=field):
        deployed.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))


def test_suspend_takes_the_groups_and_keeps_the_count(deployed: Chat) -> None:
    deployed.kubectl("patch", "infsvc", "chat", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    svc.wait_for(lambda: deployed.groups() == [] and not deployed.pods(), 90, "no group")
    assert deployed.get("infsvc", "chat")["spec"]["replicas"] == 2
    refused = httpx.post(f"{deployed.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 1}, timeout=30)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)


def test_deletion_leaves_nothing(deployed: Chat) -> None:
    deployed.kubectl("delete", "infsvc", "chat")
    kinds = "statefulsets,deployments,pods,services,secrets,serviceaccounts,roles,rolebindings,controllerrevisions,configmaps"

    def left() -> list[str]:
        names = deployed.kubectl("get", kinds, "-o", "name").split()
        return [name for name in names if not name.endswith(("/kube-root-ca.crt", "/default"))]

    svc.wait_for(lambda: not left(), 90, "nothing is left")
