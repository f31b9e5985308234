"""Speculation with a working draft, with one that cannot be loaded, and with one of another vocabulary."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.scenes import Scene

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a prompt for the draft",
    "max_tokens": 64,
    "ignore_eos": True,
    "seed": 7,
    "return_token_ids": True,
}
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def speculation(draft: str) -> dict[str, Any]:
    """Returns a spec that drafts with a model of the claim."""
    return {"engine": {"speculative": {"method": "Draft", "draftModel": f"pvc://models/{draft}"}}}


def tokens(scene: Scene) -> list[int]:
    answer = httpx.post(f"{scene.url}/v1/completions", json=BODY, timeout=120)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def leader(scene: Scene) -> dict[str, Any]:
    """Returns the leader pod of the only group of the newest revision."""
    newest = scene.status()["updateRevision"]
    (pod,) = [
        p
        for p in scene.pods().values()
        if p["metadata"]["labels"]["phalanx.dev/revision"] == newest and p["metadata"]["name"].endswith("-0")
    ]
    return pod


def leader_metric(scene: Scene, name: str) -> float:
    return svc.metric(httpx.get(f"http://{leader(scene)['status']['podIP']}:8000/metrics", timeout=10).text, name)


@pytest.fixture(scope="module")
def drafting(scene: Scene) -> Iterator[Scene]:
    """A service with a broken draft."""
    scene.apply(scene.manifest(**speculation(tiny_model.BROKEN)))
    yield scene
    scene.delete_service()


def test_unloadable_draft_is_reported_and_the_service_serves(drafting: Scene) -> None:
    drafting.wait_ready(1)
    svc.wait_for(lambda: drafting.condition("Speculating") == ("False", "DraftLost"), 60, "the condition reports it")
    assert "cannot be loaded" in drafting.message("Speculating")
    svc.wait_for(lambda: ("Warning", "DraftLost") in drafting.events(), 30, "an event reports it")
    assert drafting.condition("Ready") == ("True", "Ready")
    assert len(tokens(drafting)) == BODY["max_tokens"]
    assert leader_metric(drafting, DRAFTED) == 0
    assert leader_metric(drafting, "phalanx_speculation_lost") == 1
    log = drafting.kubectl("logs", leader(drafting)["metadata"]["name"])
    assert "served without speculation: draft model" in log


def test_working_draft_is_reported_and_answers_are_equal(drafting: Scene) -> None:
    without = tokens(drafting)
    drafting.patch(speculation(tiny_model.DRAFT))
    svc.wait_for(lambda: drafting.condition("Speculating") == ("True", "Proposing"), 300, "the condition reports it")
    drafting.wait_ready(1)
    assert tokens(drafting) == without
    assert 0 < leader_metric(drafting, ACCEPTED) < leader_metric(drafting, DRAFTED)


def test_draft_with_other_tokenizer_is_rejected_with_a_reason(drafting: Scene) -> None:
    drafting.patch(speculation(tiny_model.OTHER_TOKENS))

    def is_reported() -> bool:
        groups = drafting.status().get("groups", [])
        return any("has another vocabulary than the model" in group.get("reason", "") for group in groups)

    svc.wait_for(is_reported, 300, "the status reports the reason")
    assert drafting.condition("Ready")[0] == "False"
    assert drafting.condition("Speculating")[0] == "Unknown", "no group serves"
