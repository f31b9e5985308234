"""A whole program that speculates answers as one that does not, and says at /metrics what became of proposals."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.test_hung_rank import model, runtime

__all__ = ["model"]
pytestmark = pytest.mark.system
FEW = {str(ord(letter)): 60.0 for letter in "ab"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stop strings": {"temperature": 1.0, "seed": 3, "logit_bias": FEW, "stop": ["abba", "bbbbbb"]},
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


@pytest.mark.parametrize("tree", [(), ("--speculative-tree", "3,2")], ids=["chain", "tree"])
def test_answers_are_those_of_a_program_that_does_not_speculate(model: Path, tree: tuple[str, ...]) -> None:
    with runtime("plain", model, "--dtype", "float64") as plain:
        expected = answers(plain.base_url)
        refused = httpx.post(
            f"{plain.base_url}/v1/completions", json={"prompt": "a", "speculative": {"method": "draft"}}, timeout=60
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculative.method"), refused.text
    flags = ("--speculative-method", "ngram", "--speculative-tokens", "6", "--speculative-control", "fixed")
    with runtime("ngram", model, "--dtype", "float64", *flags, *tree) as ours:
        assert answers(ours.base_url) == expected
        shown = httpx.get(f"{ours.base_url}/metrics", timeout=10).text
        told = httpx.get(f"{ours.base_url}/v1/metrics", timeout=10).json()
    counts = {
        name: float(line.rsplit(" ", 1)[1])
        for line in shown.splitlines()
        for name in ("num_draft_tokens_total", "num_accepted_tokens_total", "speculation_branched_tokens_total")
        if line.partition("{")[0].endswith(name)
    }
    proposed, accepted = counts["num_draft_tokens_total"], counts["num_accepted_tokens_total"]
    assert 0.2 < accepted / proposed < 0.95
    assert 0.2 < told["acceptance_rate"] < 0.95
    assert (counts["speculation_branched_tokens_total"] > 0) == bool(tree)
