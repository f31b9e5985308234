"""State of rows on the device: admission, slots, masks and counts."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling.gpu.row_state import RowFeature, RowState, host_only_reason, pack_mask
from tests.runtime.rank.sampling.gpu_cases import DEVICE, Rows

VOCAB = 100
PLAIN = wire.Sampling(max_tokens=9, seed=1)
PENALISED = wire.Sampling(max_tokens=9, seed=1, presence_penalty=0.5)


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_have_one_bit_per_token(allowed: list[bool]) -> None:
    words = pack_mask(np.asarray(allowed, np.bool_)).tolist()
    assert [bool(words[token // 32] >> token % 32 & 1) for token in range(len(allowed))] == allowed
    assert len(words) == -(-len(allowed) // 32)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (PLAIN, None),
        (PENALISED, None),
        (wire.Sampling(max_tokens=9, seed=1, grammar=wire.Grammar(kind="regex", text="a")), "grammar"),
        (wire.Sampling(max_tokens=9, seed=1, bad_words=[[1], [2, 3]]), "bad words of several tokens"),
        (wire.Sampling(max_tokens=9, seed=1, return_gaps=True), "near-tie gaps"),
        (wire.Sampling(max_tokens=9, seed=1, logit_bias={100: 1.0}), "logit_bias names token 100; the model's are 0 to 99"),
    ],
)
def test_host_only_rows_are_not_admitted(sampling: wire.Sampling, reason: str | None) -> None:
    assert host_only_reason(sampling, VOCAB) == reason
    assert RowState(VOCAB, 2, DEVICE).admit(NewRow(0, sampling)) is (reason is None)


def test_launches_support_what_rows_have_slots_for() -> None:
    state = RowState(VOCAB, 8, DEVICE)
    expected = RowFeature.FILTERS
    cases: tuple[tuple[dict[str, Any], RowFeature], ...] = (
        ({"top_k": 3}, RowFeature.PLAIN),
        ({"min_tokens": 2}, RowFeature.PLAIN),
        ({"repetition_penalty": 1.1}, RowFeature.PENALTIES),
        ({"logit_bias": {1: 1.0}, "min_p": 0.1}, RowFeature.BIAS),
        ({"min_tokens": 2, "stop_token_ids": [7]}, RowFeature.MASKS),
    )
    for row, (fields, feature) in enumerate(cases):
        expected |= feature
        assert state.admit(NewRow(row, wire.Sampling(max_tokens=9, seed=1, **fields)))
        assert state.features == expected, fields
    whole = RowState(VOCAB, 8, DEVICE)
    whole.allocate_slots()
    assert whole.features == expected


def test_slots_are_allocated_once_reused_and_limited() -> None:
    state = RowState(VOCAB, 4, DEVICE, num_slots=2)
    assert state.admit(NewRow(0, PLAIN)) and state.counts.tensor is None
    assert state.admit(NewRow(0, PENALISED, 3, [5, 5, 6, 7, 7, 5]))
    assert state.counts.tensor is not None
    address = state.counts.tensor.data_ptr()
    assert {token: int(n) for token, n in enumerate(state.counts.tensor[0]) if n} == {5: 3, 6: 1, 7: 4}
    assert state.admit(NewRow(1, PENALISED))
    assert not state.admit(NewRow(2, PENALISED))
    state.release(0)
    assert state.admit(NewRow(2, PENALISED, 1, [9]))
    assert {token: int(n) for token, n in enumerate(state.counts.tensor[0]) if n} == {9: 1}
    assert state.counts.tensor.data_ptr() == address


def test_a_refused_row_leaves_no_slot_taken() -> None:
    state = RowState(VOCAB, 4, DEVICE, num_slots=1)
    both = wire.Sampling(max_tokens=9, seed=1, presence_penalty=0.5, logit_bias={1: 1.0})
    assert state.admit(NewRow(0, wire.Sampling(max_tokens=9, seed=1, logit_bias={1: 1.0})))
    assert not state.admit(NewRow(1, both))
    assert state.admit(NewRow(2, PENALISED))


def test_a_long_output_with_penalties_equals_the_reference() -> None:
    samplings = [
        wire.Sampling(max_tokens=9, seed=8, temperature=0.5, frequency_penalty=0.9, repetition_penalty=1.2),
        wire.Sampling(max_tokens=9, seed=9, temperature=0.0, presence_penalty=1.5, min_tokens=4, stop_token_ids=[11]),
        wire.Sampling(max_tokens=9, seed=9, temperature=0.0),
    ]
    rows = Rows(VOCAB, samplings, block=128)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    logits[1:, 11] = 9.0
    steps = [rows.check(logits, [0, 1, 2], [index] * 3) for index in range(12)]
    assert [step[1] == 11 for step in steps[:5]] == [False] * 4 + [True]
    assert len({step[1] for step in steps}) > 4 and {step[2] for step in steps} == {11}
