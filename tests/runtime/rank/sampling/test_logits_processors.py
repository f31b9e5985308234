"""Masks, bias and penalties equal their definitions, token by token, and the processors of `transformers`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS
from phalanx_runtime.rank.sampling.logits_processors import NOTHING_LEFT, ProcessedLogits, process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow
from tests.runtime.rank.sampling.definitions import by_definition

VOCAB = 12
INF = float("inf")


def process(raw: Tensor, requests: Sequence[tuple[list[int], list[int], wire.Sampling]]) -> ProcessedLogits:
    """Processes the logits of these (prompt, output, sampling). Every second request is admitted with its output as history."""
    rows = []
    for place, (prompt, output, sampling) in enumerate(requests):
        history = output if place % 2 else []
        rows.append(SamplingRow(NewRow(place, sampling, len(prompt), prompt + history), raw.shape[1], UNSUPPORTED_GRAMMARS))
        if not place % 2:
            for token in output:
                rows[-1].append(token)
    return process_logits(raw, rows, range(len(rows)), [len(output) for _, output, _ in requests])


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
def test_processed_logits_equal_their_definition(requests: list[tuple[list[int], list[int], wire.Sampling]], seed: int) -> None:
    raw = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = raw.clone()
    outcome = process(raw, requests)
    assert torch.equal(raw, before), "raw logits are unchanged, for logprobs"
    for place, (prompt, output, sampling) in enumerate(requests):
        expected = by_definition(raw[place].tolist(), prompt, output, sampling)
        if all(score == -INF for score in expected):
            assert outcome.failed[place] == NOTHING_LEFT
        else:
            assert place not in outcome.failed
            assert outcome.logits[place].tolist() == pytest.approx(expected, abs=1e-12)


Reference = Callable[[Any], Any]
REFERENCES: dict[str, tuple[dict[str, Any], Reference]] = {
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
@pytest.mark.parametrize(("fields", "reference"), REFERENCES.values(), ids=REFERENCES.keys())
def test_processed_logits_equal_transformers(fields: dict[str, Any], reference: Reference, history: list[int]) -> None:
    from transformers.generation import logits_process

    raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    raw[0, 4] = 0.0
    logits = process(raw, [(history[:2], history[2:], wire.Sampling(max_tokens=9, seed=0, **fields))]).logits
    expected: Tensor = reference(logits_process)(torch.tensor([history]), raw.clone())
    assert torch.equal(logits, expected)


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
    outcome = process(
        raw,
        [
            ([1], [], wire.Sampling(max_tokens=9, seed=0, **fields)),
            ([1], [], wire.Sampling(max_tokens=9, seed=0, logit_bias={3: 1.0})),
        ],
    )
    assert list(outcome.failed) == [0]
    assert name in outcome.failed[0]
    assert outcome.logits[1].argmax() == 3


def test_low_precision_logits_are_widened() -> None:
    raw = torch.ones(1, VOCAB, dtype=torch.bfloat16)
    scores = process(raw, [([1], [], wire.Sampling(max_tokens=9, seed=0, repetition_penalty=1.001))]).logits
    assert scores.dtype == torch.float32
    assert float(scores[0, 1]) == pytest.approx(1 / 1.001)
