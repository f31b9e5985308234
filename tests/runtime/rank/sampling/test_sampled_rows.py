"""Mirrored rows equal those of the sampling rank after any drafts, acceptances, preemptions and prefix hits."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS
from phalanx_runtime.rank.sampling.logits_processors import process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow
from phalanx_runtime.rank.sampling.sampled_rows import SampledRowMirror

VOCAB = 40
MODES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "words": {"bad_words": [[3, 4], [5, 6, 7], [8]]},
}


def branch(parents: list[int], node: int) -> list[int]:
    return [] if node == ROOT else [*branch(parents, parents[node]), node]


def plan_of(
    start: int, own: list[int], draft_tokens: list[int], parents: list[int], new: list[NewRow], strays: list[int]
) -> StepPlan:
    paths = [DraftPath(request=0, depth=len(draft_tokens), parents=parents)] if draft_tokens else []
    tokens, left = [*own, *draft_tokens], [(0, strays)] if strays else []
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
        relocations=left,
    )


def assert_equal_row(rows: SampledRowMirror, sampling: wire.Sampling, num_prompt: int, tokens: list[int]) -> None:
    """Checks that the row processes logits like one admitted with all these tokens."""
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(len(tokens)), dtype=torch.float64)
    whole = SamplingRow(NewRow(0, sampling, num_prompt, tokens), VOCAB, UNSUPPORTED_GRAMMARS)
    mirrored, expected = (process_logits(logits, [row], [0], [len(tokens)]).logits for row in (rows.rows[0], whole))
    torch.testing.assert_close(mirrored, expected, rtol=0, atol=0)


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES.keys())
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_row_is_mirrored_along_any_accepted_branch(fields: dict[str, Any], num_prompt: int, rng: random.Random) -> None:
    sampling = wire.Sampling(max_tokens=99, seed=1, temperature=1.0, **fields)
    tokens = [rng.randrange(VOCAB) for _ in range(num_prompt)]
    rows, strays, computed, admitted = SampledRowMirror(VOCAB, UNSUPPORTED_GRAMMARS), list[int](), 0, False
    for _ in range(25):
        if admitted and rng.random() < 0.1:  # preempted: it starts again, possibly with cached pages
            computed, admitted, strays = rng.randrange(len(tokens)), False, []
        new = [] if admitted else [NewRow(0, sampling, num_prompt, list(tokens))]
        admitted = True
        count = rng.randrange(1, len(tokens) - computed + 1) if len(tokens) - computed > 1 else 1
        is_last = computed + count == len(tokens)
        depth = rng.randrange(6) if is_last and count == 1 and computed else 0
        parents = [rng.randrange(ROOT, at) for at in range(depth)]
        draft_tokens = [rng.randrange(VOCAB) for _ in range(depth)]
        plan = plan_of(computed, tokens[computed : computed + count], draft_tokens, parents, new, strays)
        rows.update(plan)
        rows.record_drafts(plan)
        assert_equal_row(rows, sampling, num_prompt, tokens)
        computed, strays = computed + count, []
        if is_last:
            accepted = branch(parents, rng.randrange(ROOT, depth))
            first = next((at for at, node in enumerate(accepted) if node != at), len(accepted))
            strays = [computed + node for node in accepted[first:]]
            computed += len(accepted)
            tokens += [*(draft_tokens[node] for node in accepted), rng.randrange(VOCAB)]


def test_row_without_history_is_known_but_not_tracked() -> None:
    rows = SampledRowMirror(VOCAB, UNSUPPORTED_GRAMMARS)
    rows.update(
        plan_of(
            0, [1, 2, 3], [], [], [NewRow(0, wire.Sampling(max_tokens=9, seed=1, temperature=1.0, logit_bias={3: 1.0}), 3)], []
        )
    )
    rows.update(plan_of(3, [4], [5], [ROOT], [], []))
    assert not rows.rows[0].has_state and rows.rows[0].sampling.logit_bias == {3: 1.0}


def test_restarted_row_forgets_its_history() -> None:
    sampling = wire.Sampling(max_tokens=9, seed=1, temperature=1.0, presence_penalty=1.0)
    rows = SampledRowMirror(VOCAB, UNSUPPORTED_GRAMMARS)
    rows.update(plan_of(0, [1, 2], [], [], [NewRow(0, sampling, 2, [1, 2])], []))
    rows.update(plan_of(2, [3], [4, 5], [ROOT, 0], [], []))
    rows.update(plan_of(0, [7], [], [], [NewRow(0, sampling, 1, [7])], []))
    assert_equal_row(rows, sampling, 1, [7])
