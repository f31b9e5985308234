"""A whole program that speculates answers as one that does not, and says at /metrics what became of proposals."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.system.test_hung_rank import model, runtime, wait_until
from tests.system.test_openai import router_flags

__all__ = ["model"]
pytestmark = pytest.mark.system
FEW = {str(ord(letter)): 60.0 for letter in "ab"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}}, "required": ["a"]}
STOPS = ["abba", "bbbbbb"]
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stop strings": {"temperature": 1.0, "seed": 3, "logit_bias": FEW, "stop": STOPS},
    "three choices": {"temperature": 0.8, "seed": 4, "n": 3, "logit_bias": FEW},
    "schema": {
        "temperature": 1.0,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "logit_bias": FEW, "logprobs": 1},
    "min and max": {"temperature": 0.6, "seed": 6, "logit_bias": FEW, "min_tokens": 20, "max_tokens": 33},
}


def answers(base_url: str) -> dict[str, Any]:
    told = {}
    for name, fields in BODIES.items():
        body = {"prompt": "abab abab abba abab", "max_tokens": 60, "ignore_eos": True, **fields}
        answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        told[name] = [(one["text"], one["finish_reason"], one.get("stop_reason")) for one in whole["choices"]], whole["usage"]
    return told


FLAGS = ("--dtype", "float64", "--speculative-method", "ngram", "--speculative-control", "fixed", "--speculative-tokens")
COUNTS = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "speculation_branched_tokens_total")


def counts_of(base_url: str) -> dict[str, float]:
    """What became of proposals, as /metrics tells."""
    shown = httpx.get(f"{base_url}/metrics", timeout=10).text
    return {
        name: float(line.rsplit(" ", 1)[1])
        for line in shown.splitlines()
        for name in COUNTS
        if line.partition("{")[0].endswith(name)
    }


@pytest.mark.parametrize("tree", [(), ("--speculative-tree", "3,2")], ids=["chain", "tree"])
def test_answers_equal_a_program_without_speculation(model: Path, tree: tuple[str, ...]) -> None:
    with runtime("plain", model, "--dtype", "float64") as plain:
        expected = answers(plain.base_url)
        [(_, finish, stop_reason)], _ = expected["stop strings"]
        assert finish == "stop" and stop_reason in STOPS
        refused = httpx.post(
            f"{plain.base_url}/v1/completions", json={"prompt": "a", "speculative": {"method": "draft"}}, timeout=60
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculative.method"), refused.text
    with runtime("ngram", model, *FLAGS, "3", *tree) as ours:
        assert answers(ours.base_url) == expected
        counts = counts_of(ours.base_url)
        told = httpx.get(f"{ours.base_url}/v1/metrics", timeout=10).json()
    proposed, accepted = counts["num_draft_tokens_total"], counts["num_accepted_tokens_total"]
    assert 0.2 < accepted / proposed < 0.95
    assert 0.2 < told["acceptance_rate"] < 0.95
    assert (counts["speculation_branched_tokens_total"] > 0) == bool(tree)


def test_stop_string_inside_an_accepted_run_ends_the_text(model: Path) -> None:
    """Only one letter may be drawn, and it is looked up: so one token is drawn with the prompt and then seven in each step."""
    stop = 10 * "a"
    fields = {"temperature": 0, "logit_bias": {str(ord("a")): 100.0}, "stop": [stop], "include_stop_str_in_output": True}
    body = {"prompt": 20 * "a", "max_tokens": 60, "ignore_eos": True, **fields}
    with runtime("inside", model, *FLAGS, "6") as ours:
        answer = httpx.post(f"{ours.base_url}/v1/completions", json=body, timeout=60).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (stop, "stop", stop)
        assert answer["usage"]["completion_tokens"] == len(stop)
        wait_until(lambda: counts_of(ours.base_url)["num_drafts_total"] > 1)
        counts = counts_of(ours.base_url)
    assert counts["num_accepted_tokens_total"] == counts["num_draft_tokens_total"] > 5 * counts["num_drafts_total"]
    assert (len(stop) - 1) % 7, "no run ends with it"


def test_request_may_enable_or_disable_speculation(model: Path) -> None:
    """Asked at the router, which passes it on."""
    token = model.parent / "token"
    for name, flags, asked in [("without", (), "ngram"), ("with", (*FLAGS, "3"), "none")]:
        with (
            runtime(name, model, *flags) as ours,
            running("router", "phalanx_router", router_flags([ours], token), token.parent) as door,
        ):

            def drafts(fields: dict[str, Any], ours: Program = ours, door: Program = door) -> float:
                """For how many more steps something was proposed, once a request is answered."""
                before = counts_of(ours.base_url)["num_drafts_total"]
                body = {
                    "model": "tiny",
                    "prompt": 20 * "ab",
                    "temperature": 0,
                    "logit_bias": FEW,
                    "max_tokens": 40,
                    "ignore_eos": True,
                }
                answer = httpx.post(f"{door.base_url}/v1/completions", json={**body, **fields}, timeout=60)
                assert answer.status_code == 200, answer.text
                return counts_of(ours.base_url)["num_drafts_total"] - before

            usual, own = drafts({}), drafts({"speculative": {"method": asked}})
            assert (usual > 0, own > 0) == (bool(flags), not flags)
