"""The complete path with a real model: apply, serve, scale, lose a pod, lose the operator, delete.

The tests share one service and run in order; each leaves it Ready with two groups of TP 2 over two nodes.
"""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from bench.frame.equality import compare
from tests.cluster import service as svc
from tests.cluster.chat import Chat
from tests.cluster.fixtures import Cluster
from tests.cluster.reference import PROMPTS, Reference, greedy
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tests.polling import wait_until
from tools.errors import Failed

pytestmark = pytest.mark.cluster
MAX_TOKENS = 40
LONG = 240


@pytest.fixture(scope="module")
def expected(real_model_dir: Path) -> list[Reference]:
    """Computed before the service starts, which needs the processors."""
    return greedy(real_model_dir, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def deployed(expected: list[Reference], cluster: Cluster, operator: str, real_model: str, namespace: str) -> Iterator[Chat]:
    """The service, Ready."""
    service = Chat(cluster, namespace)
    manifest = svc.manifest("chat", model=real_model, replicas=2, servedNames=["smollm2"], router={"batches": {"enabled": True}})
    service.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    service.wait_ready(2)
    yield service


@pytest.fixture(scope="module")
def assert_equal(expected: list[Reference], real_model_dir: Path) -> Callable[[list[svc.Answer]], None]:
    """Returns a check that answers to the first prompts equal those of `transformers`, except near-ties."""
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
    """Runs an action in a thread after a number of chunks."""

    def __init__(self, chunks: int, action: Callable[[], object]) -> None:
        self._chunks = chunks
        self._action = action
        self._thread: threading.Thread | None = None

    def __call__(self, chunks: int) -> None:
        if chunks >= self._chunks and self._thread is None:
            self._thread = threading.Thread(target=self._action)
            self._thread.start()

    def join(self) -> None:
        assert self._thread is not None, "the streams ended before the action"
        self._thread.join()


def test_two_groups_span_both_nodes(deployed: Chat) -> None:
    nodes: dict[str, set[str]] = {}
    for pod in deployed.pods().values():
        nodes.setdefault(pod["metadata"]["labels"]["phalanx.dev/group"], set()).add(pod["spec"]["nodeName"])
    assert sorted(nodes) == deployed.groups()
    assert [len(names) for names in nodes.values()] == [2, 2]


def test_pods_use_the_kernels_of_their_image(deployed: Chat) -> None:
    for name in deployed.pods():
        logs = deployed.kubectl("logs", name)
        if shutil.which("g++") is None and deployed.cluster.files is not None:
            assert "no compiled kernels" in logs, "the image was built without a compiler"
        else:
            assert re.search(r"compiled kernels loaded kernels=(x86-64-v|armv8-a)\S* is_prebuilt=True", logs), logs[:2000]


def test_sixteen_streams_equal_transformers(
    deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None]
) -> None:
    assert_equal(asyncio.run(svc.stream_all(deployed.url, bodies(expected))))


def test_seeded_streams_are_equal(deployed: Chat) -> None:
    body = {"model": "smollm2", "prompt": "The sky is", "max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    first, second = asyncio.run(svc.stream_all(deployed.url, [body, body]))
    assert (first.error, first.usage) == (None, 24)
    assert first.text == second.text


def test_a_batch_is_answered(deployed: Chat, expected: list[Reference]) -> None:
    requests = {f"line {number}": body for number, body in enumerate(bodies(expected[:8]))}
    lines = [{"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body} for id, body in requests.items()]
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="unused") as client:
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 120.0)
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == set(requests)
    assert {answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers} == {MAX_TOKENS}


def test_a_deleted_pod_loses_and_doubles_no_token(
    deployed: Chat, expected: list[Reference], assert_equal: Callable[[list[svc.Answer]], None]
) -> None:
    before, broken = deployed.uids(), ""
    longer = [{**body, "max_tokens": LONG} for body in bodies(expected[:8])]  # a deleted pod has two seconds
    undisturbed = asyncio.run(svc.stream_all(deployed.url, longer))
    takeovers = deployed.num_takeovers()

    def kill() -> None:
        nonlocal broken
        broken = deployed.busiest()
        deployed.kubectl("delete", "pod", f"{broken}-1", "--wait=false", "--grace-period=1")

    killer = Once(8, kill)
    answers = asyncio.run(svc.stream_all(deployed.url, longer, killer))
    killer.join()
    assert [(a.error, a.finish, a.usage) for a in answers] == [(None, "length", LONG)] * len(answers)
    assert [a.text for a in answers] == [a.text for a in undisturbed]
    assert deployed.num_takeovers() > takeovers
    svc.wait_for(
        lambda: deployed.uids().get(f"{broken}-1", before[f"{broken}-1"]) != before[f"{broken}-1"], 90, "the pod is replaced"
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
    """The suite of the OpenAI client through a real router."""


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
def test_invalid_manifest_is_rejected_with_its_field(deployed: Chat, changes: dict[str, Any], field: str) -> None:
    manifest = svc.manifest("bad", model="hf://org/name", replicas=1)
    manifest["spec"] |= changes
    with pytest.raises(Failed, match=field):
        deployed.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))


def test_suspend_deletes_the_groups_and_keeps_the_count(deployed: Chat) -> None:
    deployed.kubectl("patch", "infsvc", "chat", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    svc.wait_for(lambda: deployed.groups() == [] and not deployed.pods(), 90, "no group")
    assert deployed.get("infsvc", "chat")["spec"]["replicas"] == 2
    rejected = httpx.post(f"{deployed.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 1}, timeout=30)
    assert (rejected.status_code, "retry-after" in rejected.headers) == (503, True)


def test_deletion_leaves_nothing(deployed: Chat) -> None:
    deployed.kubectl("delete", "infsvc", "chat")
    kinds = "statefulsets,deployments,pods,services,secrets,serviceaccounts,roles,rolebindings,controllerrevisions,configmaps"

    def remaining() -> list[str]:
        names = deployed.kubectl("get", kinds, "-o", "name").split()
        return [name for name in names if not name.endswith(("/kube-root-ca.crt", "/default"))]

    svc.wait_for(lambda: not remaining(), 90, "nothing remains")
