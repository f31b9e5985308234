"""A program with speculation: equal answers, and counts of draft tokens at /metrics."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program, running
from tests.system.runtimes import QUERIED, metric_of, router_flags, runtime, until_idle

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
    found = {}
    for name, fields in BODIES.items():
        body = {"prompt": "abab abab abba abab", "max_tokens": 60, "ignore_eos": True, **fields}
        answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        choices = [(choice["text"], choice["finish_reason"], choice.get("stop_reason")) for choice in whole["choices"]]
        found[name] = choices, whole["usage"]
    return found


FLAGS = ("--dtype", "float64", "--speculative-method", "ngram", "--speculative-control", "fixed", "--speculative-tokens")
COUNTS = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "speculation_branched_tokens_total")


def counts_of(base_url: str) -> dict[str, float]:
    """Counts of draft tokens at /metrics."""
    page = httpx.get(f"{base_url}/metrics", timeout=10).text
    return {
        name: float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
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
    with runtime("ngram", model, *FLAGS, "3", *tree) as program:
        assert answers(program.base_url) == expected
        counts = counts_of(program.base_url)
        metrics = httpx.get(f"{program.base_url}/v1/metrics", timeout=10).json()
    proposed, accepted = counts["num_draft_tokens_total"], counts["num_accepted_tokens_total"]
    assert 0.2 < accepted / proposed < 0.95
    assert 0.2 < metrics["acceptance_rate"] < 0.95
    assert (counts["speculation_branched_tokens_total"] > 0) == bool(tree)


def test_stop_string_inside_an_accepted_run_ends_the_text(model: Path) -> None:
    """Only one letter can be sampled and drafted: one token with the prompt, then seven in each step."""
    stop = 10 * "a"
    fields = {"temperature": 0, "logit_bias": {str(ord("a")): 100.0}, "stop": [stop], "include_stop_str_in_output": True}
    body = {"prompt": 20 * "a", "max_tokens": 60, "ignore_eos": True, **fields}
    with runtime("inside", model, *FLAGS, "6") as program:
        answer = httpx.post(f"{program.base_url}/v1/completions", json=body, timeout=60).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (stop, "stop", stop)
        assert answer["usage"]["completion_tokens"] == len(stop)
        until_idle(program, 0)
        counts = counts_of(program.base_url)
    assert counts["num_accepted_tokens_total"] == counts["num_draft_tokens_total"] > 5 * counts["num_drafts_total"]
    assert (len(stop) - 1) % 7, "no step ends with it"


def test_request_may_enable_or_disable_speculation(model: Path) -> None:
    """Through the router."""
    token = model.parent / "token"
    for name, flags, method in [("without", (), "ngram"), ("with", (*FLAGS, "3"), "none")]:
        with (
            runtime(name, model, *flags) as program,
            running("router", "phalanx_router", router_flags([program], token), token.parent) as router,
        ):

            def count_drafts(fields: dict[str, Any], program: Program = program, router: Program = router) -> float:
                """Steps with draft tokens for one request."""
                before, queried = counts_of(program.base_url)["num_drafts_total"], metric_of(program, QUERIED)
                body = {
                    "model": "tiny",
                    "prompt": 20 * "ab",
                    "temperature": 0,
                    "logit_bias": FEW,
                    "max_tokens": 40,
                    "ignore_eos": True,
                }
                answer = httpx.post(f"{router.base_url}/v1/completions", json={**body, **fields}, timeout=60)
                assert answer.status_code == 200, answer.text
                until_idle(program, queried)
                return counts_of(program.base_url)["num_drafts_total"] - before

            default, own = count_drafts({}), count_drafts({"speculative": {"method": method}})
            assert (default > 0, own > 0) == (bool(flags), not flags)
