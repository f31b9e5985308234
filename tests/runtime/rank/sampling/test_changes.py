"""Masks, bias and penalties: equal to their definitions, token by token, and to the processors of `transformers`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.logits_processors import NOTHING_LEFT, ProcessedLogits, process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow

VOCAB = 12
INF = float("inf")


def changed(raw: Tensor, requests: Sequence[tuple[list[int], list[int], wire.Sampling]]) -> ProcessedLogits:
    """Scores of requests with these prompts and outputs. Every second one draws its output here, the others bring it."""
    rows = []
    for place, (prompt, output, sampling) in enumerate(requests):
        brought = output if place % 2 else []
        rows.append(SamplingRow(NewRow(place, sampling, len(prompt), prompt + brought), raw.shape[1], None))
        if not place % 2:
            for token in output:
                rows[-1].drew(token)
    return process_logits(raw, rows, range(len(rows)), [len(output) for _, output, _ in requests])


def by_definition(raw: Sequence[float], prompt: list[int], output: list[int], s: wire.Sampling) -> list[float]:
    """The same, one token after the other."""
    scores = []
    tokens = prompt + output
    for token, score in enumerate(raw):
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            score = -INF
        for word in s.bad_words:
            before = word[:-1]
            if token == word[-1] and (not before or tokens[-len(before) :] == before):
                score = -INF
        if token in s.stop_token_ids and len(output) < s.min_tokens:
            score = -INF
        score += s.logit_bias.get(token, 0.0)
        if token in tokens:
            score = score / s.repetition_penalty if score > 0 else score * s.repetition_penalty
        if token in output:
            score -= s.frequency_penalty * output.count(token) + s.presence_penalty
        scores.append(score)
    return scores


ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    wire.Sampling,
    max_tokens=st.just(9),
    seed=st.just(0),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(ids, max_size=2),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=8),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
)
tokens = st.lists(ids, max_size=6)


@settings(deadline=None, max_examples=150)
@given(requests=st.lists(st.tuples(tokens.filter(bool), tokens, samplings), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_changes_are_as_defined(requests: list[tuple[list[int], list[int], wire.Sampling]], seed: int) -> None:
    raw = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = raw.clone()
    outcome = changed(raw, requests)
    assert torch.equal(raw, before), "raw scores stay, logprobs are made of them"
    for place, (prompt, output, sampling) in enumerate(requests):
        expected = by_definition(raw[place].tolist(), prompt, output, sampling)
        if all(score == -INF for score in expected):
            assert outcome.failed[place] == NOTHING_LEFT
        else:
            assert place not in outcome.failed
            assert outcome.scores[place].tolist() == pytest.approx(expected, abs=1e-12)


Twin = Callable[[Any], Any]
AGAINST: dict[str, tuple[dict[str, Any], Twin]] = {
    "repetition penalty": ({"repetition_penalty": 1.3}, lambda t: t.RepetitionPenaltyLogitsProcessor(1.3)),
    "repetition bonus": ({"repetition_penalty": 0.8}, lambda t: t.RepetitionPenaltyLogitsProcessor(0.8)),
    "bad words": (
        {"bad_words": [[3], [4, 5], [1, 2, 6], [7, 8, 1, 2, 9]]},
        lambda t: t.NoBadWordsLogitsProcessor([[3], [4, 5], [1, 2, 6], [7, 8, 1, 2, 9]], eos_token_id=0),
    ),
    "min tokens, not yet": (
        {"min_tokens": 4, "stop_token_ids": [0, 11]},
        lambda t: t.MinNewTokensLengthLogitsProcessor(2, 4, eos_token_id=[0, 11]),
    ),
    "min tokens, just": (
        {"min_tokens": 3, "stop_token_ids": [0, 11]},
        lambda t: t.MinNewTokensLengthLogitsProcessor(2, 3, eos_token_id=[0, 11]),
    ),
    "bias": (
        {"logit_bias": {2: -3.5, 5: 1.25}},
        lambda t: t.SequenceBiasLogitsProcessor([[[2], -3.5], [[5], 1.25]]),
    ),
}


@pytest.mark.parametrize("history", [[7, 8, 9, 1, 2], [1, 1, 4, 4, 4], [0, 5, 7, 8, 1]], ids=str)
@pytest.mark.parametrize(("fields", "twin"), AGAINST.values(), ids=AGAINST.keys())
def test_changes_are_those_of_transformers(fields: dict[str, Any], twin: Twin, history: list[int]) -> None:
    from transformers.generation import logits_process

    raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    raw[0, 4] = 0.0
    ours = changed(raw, [(history[:2], history[2:], wire.Sampling(max_tokens=9, seed=0, **fields))]).scores
    theirs: Tensor = twin(logits_process)(torch.tensor([history]), raw.clone())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias names token 12"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids names token -1"),
        ({"bad_words": [[1], [2, 99]]}, "bad_words names token 99"),
    ],
)
def test_token_outside_the_vocabulary_fails_only_its_request(fields: dict[str, Any], name: str) -> None:
    raw = torch.zeros(2, VOCAB)
    outcome = changed(
        raw,
        [
            ([1], [], wire.Sampling(max_tokens=9, seed=0, **fields)),
            ([1], [], wire.Sampling(max_tokens=9, seed=0, logit_bias={3: 1.0})),
        ],
    )
    assert list(outcome.failed) == [0]
    assert name in outcome.failed[0]
    assert outcome.scores[1].argmax() == 3


def test_low_precision_scores_are_widened() -> None:
    raw = torch.ones(1, VOCAB, dtype=torch.bfloat16)
    scores = changed(raw, [([1], [], wire.Sampling(max_tokens=9, seed=0, repetition_penalty=1.001))]).scores
    assert scores.dtype == torch.float32
    assert float(scores[0, 1]) == pytest.approx(1 / 1.001)
