"""The comparison of explanations with real engines: its judgement, and its requests."""

import random

import pytest

from bench.engine.explained import LOADS, NUM_PREFIXES, PREFIX_TOKENS, Measured, body, compare
from bench.frame.client import Answer
from tests.control.summaries import group, summary

FULL = summary(group(running=4, waiting=9, max_num_seqs=4, max_num_batched_tokens=256), rate=50.0)


def measured(tokens: int) -> Measured:
    """A run of a second whose last half has this output."""
    return Measured(FULL, [Answer(started=0.0, ended=1.0, completion_tokens=tokens)], 1.0)


def test_prediction_is_judged_by_the_second_run() -> None:
    (_, metric, _, predicted, _, _) = compare(LOADS["queue"], lambda is_changed: measured(1))
    assert metric == "output"
    for factor, verdict in ((1.0, "yes"), (1.15, "yes"), (1.4, "NO"), (0.7, "NO")):
        tokens = float(predicted) * factor / 2
        row = compare(LOADS["queue"], lambda is_changed, tokens=tokens: measured(round(tokens)))  # type: ignore[misc]
        assert row[-1] == verdict, row


def test_another_limit_is_a_miss() -> None:
    row = compare(LOADS["prefix"], lambda is_changed: measured(100))
    assert (row[1], row[-1]) == ("queue", "NO")


@pytest.mark.parametrize("name", LOADS)
def test_requests_have_their_lengths(name: str) -> None:
    draw = random.Random(1)
    bodies = [body(LOADS[name], draw) for _ in range(200)]
    shared = PREFIX_TOKENS if LOADS[name].has_prefixes else 0
    prompts = [found["prompt"] for found in bodies]
    assert all(isinstance(prompt, list) and len(prompt) == shared + 32 for prompt in prompts)
    starts = {tuple(prompt[:shared]) for prompt in prompts if isinstance(prompt, list)}
    assert len(starts) == (NUM_PREFIXES if shared else 1)
    assert {found["max_tokens"] for found in bodies} == {LOADS[name].output}
