"""A service that drafts: with a draft that works, with one that cannot be loaded, and with one of other tokens."""

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
    "prompt": "what the draft may know",
    "max_tokens": 64,
    "ignore_eos": True,
    "seed": 7,
    "return_token_ids": True,
}
DRAFTED, KEPT = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def by(draft: str) -> dict[str, Any]:
    """What the spec says to draft by that model of the claim."""
    return {"engine": {"speculative": {"method": "Draft", "draftModel": f"pvc://models/{draft}"}}}


def tokens(scene: Scene) -> list[int]:
    answer = httpx.post(f"{scene.url}/v1/completions", json=BODY, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def leader(scene: Scene) -> dict[str, Any]:
    """The leader pod of the only group of the newest revision."""
    newest = scene.status()["updateRevision"]
    (pod,) = [
        p
        for p in scene.pods().values()
        if p["metadata"]["labels"]["phalanx.dev/revision"] == newest and p["metadata"]["name"].endswith("-0")
    ]
    return pod


def counted(scene: Scene, name: str) -> float:
    return svc.metric(httpx.get(f"http://{leader(scene)['status']['podIP']}:8000/metrics", timeout=10).text, name)


@pytest.fixture(scope="module")
def drafting(scene: Scene) -> Iterator[Scene]:
    """A service whose draft is broken."""
    scene.apply(scene.manifest(**by(tiny_model.BROKEN)))
    yield scene
    scene.gone()


def test_unloadable_draft_is_reported_and_the_service_serves(drafting: Scene) -> None:
    drafting.wait_ready(1)
    svc.wait_for(lambda: drafting.condition("Speculating") == ("False", "DraftLost"), 60, "the condition says so")
    assert "cannot be loaded" in drafting.message("Speculating")
    svc.wait_for(lambda: ("Warning", "DraftLost") in drafting.events(), 30, "and an event")
    assert drafting.condition("Ready") == ("True", "Ready")
    assert len(tokens(drafting)) == BODY["max_tokens"]
    assert counted(drafting, DRAFTED) == 0
    assert counted(drafting, "phalanx_speculation_lost") == 1
    log = drafting.kubectl("logs", leader(drafting)["metadata"]["name"])
    assert "served without speculation: draft model" in log


def test_working_draft_is_reported_and_answers_are_equal(drafting: Scene) -> None:
    without = tokens(drafting)
    drafting.patch(by(tiny_model.DRAFT))
    svc.wait_for(lambda: drafting.condition("Speculating") == ("True", "Proposing"), 300, "the condition says so")
    drafting.wait_ready(1)
    assert tokens(drafting) == without
    assert 0 < counted(drafting, KEPT) < counted(drafting, DRAFTED)


def test_draft_with_other_tokenizer_is_refused_with_a_reason(drafting: Scene) -> None:
    drafting.patch(by(tiny_model.OTHER_TOKENS))

    def said() -> bool:
        groups = drafting.status().get("groups", [])
        return any("has another vocabulary than the model" in group.get("reason", "") for group in groups)

    svc.wait_for(said, 300, "the status says why the group does not serve")
    assert drafting.condition("Ready")[0] == "False"
    assert drafting.condition("Speculating")[0] == "Unknown", "nothing is known of a group that does not serve"
