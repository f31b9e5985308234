"""The whole path on a real cluster with a real model: apply, serve, scale, lose a pod, lose the operator, delete.

The tests share one service and run in order; each leaves it Ready with two groups.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tests.cluster.reference import PROMPTS, greedy
from tests.runtime.equal import Reference, compare

pytestmark = pytest.mark.cluster
MAX_TOKENS = 40
GROUPS = "phalanx.dev/component=group"


@dataclass(frozen=True, slots=True)
class Chat:
    """The service under test: two groups of TP 2 over two nodes."""

    cluster: Cluster
    namespace: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *args, stdin=stdin)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def pods(self, selector: str = GROUPS) -> dict[str, dict[str, Any]]:
        return {p["metadata"]["name"]: p for p in self.get("pods", "-l", selector)["items"]}

    def groups(self) -> list[str]:
        return sorted(s["metadata"]["name"] for s in self.get("statefulsets")["items"])

    @property
    def url(self) -> str:
        return f"http://{self.kubectl('get', 'service', 'chat', '-o', 'jsonpath={.spec.clusterIP}')}"

    def ready(self, groups: int) -> bool:
        status = self.get("infsvc", "chat").get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        return conditions.get("Ready") == "True" and status.get("readyReplicas") == groups and status.get("replicas") == groups

    def wait_ready(self, groups: int, limit_s: float = 300) -> None:
        try:
            svc.wait_for(lambda: self.ready(groups), limit_s, f"{groups} ready groups")
        except TimeoutError as late:
            shown = self.kubectl("get", "infsvc,statefulsets,pods", "-o", "wide")
            logs = self.kubectl("logs", "-l", GROUPS, "--tail=15", "--prefix")
            status = json.dumps(self.get("infsvc", "chat").get("status"), indent=1)
            raise TimeoutError(f"{late}\n{shown}\n{status}\n{logs}") from None


@pytest.fixture(scope="module")
def chat(cluster: Cluster, operator: str, real_model: str, namespace: str) -> Iterator[Chat]:
    """The service, Ready."""
    service = Chat(cluster, namespace)
    manifest = svc.manifest("chat", model=real_model, replicas=2, servedNames=["smollm2"])
    service.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    service.wait_ready(2)
    yield service


@pytest.fixture(scope="module")
def expected(real_model_dir: Any) -> tuple[list[list[int]], list[Reference]]:
    return greedy(real_model_dir, PROMPTS, MAX_TOKENS)


def bodies(prompts: list[list[int]]) -> list[dict[str, Any]]:
    fixed = {"model": "smollm2", "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return [{**fixed, "prompt": prompt} for prompt in prompts]


def assert_equal(answers: list[svc.Answer], expected: list[Reference]) -> None:
    assert [a.error for a in answers] == [None] * len(answers)
    assert [(len(a.tokens), a.finish) for a in answers] == [(MAX_TOKENS, "length")] * len(answers)
    verdict = compare(expected, [a.tokens for a in answers])
    assert verdict.equal, verdict


def test_two_groups_span_both_nodes(chat: Chat) -> None:
    nodes: dict[str, set[str]] = {}
    for pod in chat.pods().values():
        nodes.setdefault(pod["metadata"]["labels"]["phalanx.dev/group"], set()).add(pod["spec"]["nodeName"])
    assert sorted(nodes) == chat.groups()
    assert [len(names) for names in nodes.values()] == [2, 2]


def test_sixteen_streams_equal_transformers(chat: Chat, expected: tuple[list[list[int]], list[Reference]]) -> None:
    prompts, references = expected
    assert_equal(asyncio.run(svc.stream_all(chat.url, bodies(prompts))), references)


def test_seeded_stream_is_the_same_twice(chat: Chat) -> None:
    body = {"model": "smollm2", "prompt": "The sky is", "max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    one, two = asyncio.run(svc.stream_all(chat.url, [body, body]))
    assert (one.error, len(one.tokens)) == (None, 24)
    assert one.tokens == two.tokens


def test_deleted_pod_loses_and_doubles_no_token(chat: Chat, expected: tuple[list[list[int]], list[Reference]]) -> None:
    prompts, references = expected
    before = {name: pod["metadata"]["uid"] for name, pod in chat.pods().items()}
    broken = chat.groups()[0]
    tokens_seen = threading.Event()

    def delete_half_way() -> None:
        assert tokens_seen.wait(60)
        chat.kubectl("delete", "pod", f"{broken}-1", "--wait=false")

    killer = threading.Thread(target=delete_half_way)
    killer.start()
    answers = asyncio.run(svc.stream_all(chat.url, bodies(prompts[:8]), lambda n: tokens_seen.set() if n > 5 else None))
    killer.join()
    assert_equal(answers, references[:8])
    assert svc.metric(chat.router_metrics(), "phalanx_router_replays_total") > 0
    svc.wait_for(lambda: chat.pods().get(f"{broken}-1", {}).get("metadata", {}).get("uid", "") not in ("", before[f"{broken}-1"]), 90, "a new pod")
    chat.wait_ready(2)
    after = {name: pod["metadata"]["uid"] for name, pod in chat.pods().items()}
    assert {n for n in before if after.get(n) != before[n]} == {f"{broken}-1"}
