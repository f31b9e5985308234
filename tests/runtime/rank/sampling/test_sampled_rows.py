"""Rows that are followed from the plans are as far as the drawer's, whatever was proposed, accepted, preempted or found."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import OWN
from phalanx_runtime.core.step_plan import NewRow, Path, StepPlan
from phalanx_runtime.rank.sampling.logits_processors import process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.sampling.sampled_rows import SampledRowMirror

VOCAB = 40
WAYS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "words": {"bad_words": [[3, 4], [5, 6, 7], [8]]},
}


def branch(parents: list[int], node: int) -> list[int]:
    return [] if node == OWN else [*branch(parents, parents[node]), node]


def plan_of(
    start: int, own: list[int], proposed: list[int], parents: list[int], new: list[NewRow], strays: list[int]
) -> StepPlan:
    paths = [Path(request=0, depth=len(proposed), parents=parents)] if proposed else []
    tokens, left = [*own, *proposed], [(0, strays)] if strays else []
    return StepPlan(
        step=1,
        admitted=new,
        rows=[0],
        starts=[start],
        counts=[len(tokens)],
        pages=[[]],
        tokens=tokens,
        draws=[(0, 0)],
        paths=paths,
        strays=left,
    )


def assert_as_far(rows: SampledRowMirror, asked: wire.Sampling, num_prompt: int, tokens: list[int]) -> None:
    """The row changes scores as one that was admitted with all of these."""
    scores = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(len(tokens)), dtype=torch.float64)
    whole = SamplingRow(NewRow(0, asked, num_prompt, tokens), VOCAB, None)
    ours, theirs = (process_logits(scores, [row], [0], [len(tokens)]).scores for row in (rows.rows[0], whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS.keys())
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_row_is_followed_along_whatever_branch_was_accepted(
    fields: dict[str, Any], num_prompt: int, chance: random.Random
) -> None:
    asked = wire.Sampling(max_tokens=99, seed=1, temperature=1.0, **fields)
    tokens = [chance.randrange(VOCAB) for _ in range(num_prompt)]
    rows, strays, computed, admitted = SampledRowMirror(VOCAB, None), list[int](), 0, False
    for _ in range(25):
        if admitted and chance.random() < 0.1:  # preempted: it begins anew, and may find pages
            computed, admitted, strays = chance.randrange(len(tokens)), False, []
        new = [] if admitted else [NewRow(0, asked, num_prompt, list(tokens))]
        admitted = True
        count = chance.randrange(1, len(tokens) - computed + 1) if len(tokens) - computed > 1 else 1
        is_last = computed + count == len(tokens)
        depth = chance.randrange(6) if is_last and count == 1 and computed else 0
        parents = [chance.randrange(OWN, at) for at in range(depth)]
        proposed = [chance.randrange(VOCAB) for _ in range(depth)]
        plan = plan_of(computed, tokens[computed : computed + count], proposed, parents, new, strays)
        rows.follow(plan)
        rows.proposed(plan)
        assert_as_far(rows, asked, num_prompt, tokens)
        computed, strays = computed + count, []
        if is_last:
            accepted = branch(parents, chance.randrange(OWN, depth))
            first = next((at for at, node in enumerate(accepted) if node != at), len(accepted))
            strays = [computed + node for node in accepted[first:]]
            computed += len(accepted)
            tokens += [*(proposed[node] for node in accepted), chance.randrange(VOCAB)]


def test_row_without_history_is_known_but_not_tracked() -> None:
    rows = SampledRowMirror(VOCAB, None)
    rows.follow(
        plan_of(
            0, [1, 2, 3], [], [], [NewRow(0, wire.Sampling(max_tokens=9, seed=1, temperature=1.0, logit_bias={3: 1.0}), 3)], []
        )
    )
    rows.follow(plan_of(3, [4], [5], [OWN], [], []))
    assert not rows.rows[0].has_state and rows.rows[0].sampling.logit_bias == {3: 1.0}


def test_restarted_row_forgets_its_history() -> None:
    asked = wire.Sampling(max_tokens=9, seed=1, temperature=1.0, presence_penalty=1.0)
    rows = SampledRowMirror(VOCAB, None)
    rows.follow(plan_of(0, [1, 2], [], [], [NewRow(0, asked, 2, [1, 2])], []))
    rows.follow(plan_of(2, [3], [4, 5], [OWN, 0], [], []))
    rows.follow(plan_of(0, [7], [], [], [NewRow(0, asked, 1, [7])], []))
    assert_as_far(rows, asked, 1, [7])
