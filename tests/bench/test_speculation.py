"""Evaluation of the speculation benchmark."""

import time
from pathlib import Path

import pytest
import torch

from bench.frame.figures import Interval, median_interval
from bench.frame.runner_parts import Part, shifted
from bench.speculation.__main__ import COLUMNS, Engine, has_all, row_of, sampling_of, take_turns
from bench.speculation.limit import Times, ratios, times_of
from bench.speculation.outcome import Outcome
from bench.speculation.prompts import KINDS, SHORT_KINDS, kinds_for
from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.tiny import save_tiny


def test_times_are_per_pass_and_per_draft_token() -> None:
    times = times_of(plain_s=0.010, step_s=0.030, draft_s=0.016, depth=4)
    assert (times.plain_s, times.pass_s, times.token_s) == pytest.approx((0.010, 0.004, 0.001))


def test_the_best_ratio_follows_from_passes_and_shares() -> None:
    assert ratios(Times(0.010, 0.004, 0.001), [0.6, 0.3]) == pytest.approx([1.6 / 1.5, 1.9 / 2.0])
    free = ratios(Times(0.010, 0.0, 0.0), [0.6, 0.3])
    assert free == pytest.approx([1.6, 1.9]), "a free draft gains all accepted tokens"


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.98, 1.1, "yes"), (0.9, 0.96, "NO"), (0.95, 0.99, "not distinguishable")])
def test_an_interval_that_holds_the_bound_decides_nothing(low: float, high: float, verdict: str) -> None:
    assert Interval((low + high) / 2, low, high, 7).verdict(0.97) == verdict


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(5, 0.0, float("inf")), (6, 1.0, 6.0), (7, 1.0, 7.0), (9, 2.0, 8.0), (15, 4.0, 12.0), (41, 14.0, 28.0)],
)
def test_median_interval_lies_between_two_values(count: int, low: float, high: float) -> None:
    """Values from tables of the sign test."""
    found = median_interval([float(value) for value in range(count, 0, -1)])
    assert (found.middle, found.low, found.high, found.num_pairs) == ((count + 1) / 2, low, high, count)


def test_part_of_a_runner_owns_its_rows_and_pages() -> None:
    new = NewRow(1, sampling_of({}))
    plan = StepPlan(
        step=3,
        admitted=[new],
        rows=[1, 0],
        starts=[0, 4],
        counts=[2, 1],
        pages=[[0, 2], []],
        tokens=[7, 8, 9],
        draws=[(1, 1)],
        copies=[(0, 1)],
        truncations=[(1, 1)],
    )
    moved = shifted(plan, first_row=64, first_page=100)
    assert [new.row for new in moved.admitted] == [65] and moved.rows == [65, 64]
    assert moved.pages == [[100, 102], []] and moved.copies == [(100, 101)]
    unchanged = [(each.step, each.starts, each.counts, each.tokens, each.draws, each.truncations) for each in (plan, moved)]
    assert unchanged[0] == unchanged[1], "these count within the plan or within a row"


def test_engines_that_take_turns_over_one_runner_keep_apart(tmp_path: Path) -> None:
    """Repetitive prompts with and without n-grams in float64: equal tokens, some of them accepted drafts."""
    prompts = [[number, 3, 4, 5, 3, 4, 5, 3, 4] for number in range(6, 10)]

    def work(runner: ModelRunner) -> list[tuple[Outcome, Outcome]]:
        limits, sampling = (
            Limits(max_model_len=120, max_num_seqs=4, max_num_batched_tokens=64),
            sampling_of({"allowed_token_ids": [3, 4, 5]}),
        )
        plain, ours = (
            Engine(Part(runner, part, 2, 4), limits, speculation, time.perf_counter, sampling)
            for part, speculation in enumerate(
                (SpeculationConfig(), SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False))
            )
        )
        return take_turns(plain, ours, [prompts[:3], prompts[3:]], count=2, max_tokens=20)

    pairs = on_ranks(save_tiny(tmp_path), [1], Build(torch.float64, num_pages=40), work)
    assert [len(plain.tokens) for plain, _ in pairs] == [4, 4] and all(plain.tokens == ours.tokens for plain, ours in pairs)
    assert all(len(tokens) == 20 for plain, _ in pairs for tokens in plain.tokens)
    assert sum(sum(ours.counts.accepted) for _, ours in pairs) > 0 and not any(plain.counts.paths for plain, _ in pairs)


@pytest.mark.parametrize(("proposed", "is_complete"), [([100, 99, 97, 95], True), ([100, 60, 20, 10], False)])
def test_output_states_where_all_drafts_were_generated(proposed: list[int], is_complete: bool) -> None:
    ours = Outcome([], counts=SpeculationCounts(paths=100, drafted=proposed))
    assert has_all([(Outcome([]), ours)]) == is_complete


@pytest.mark.parametrize(
    ("counts", "expected"),
    [(SpeculationCounts(paths=20, drafted=[20, 16], accepted=[13, 2]), "0.75"), (SpeculationCounts(), "-")],
)
def test_accepted_tokens_are_reported_per_draft_length(counts: SpeculationCounts, expected: str) -> None:
    """Steps without draft tokens do not count."""
    plain = Outcome([[1]], total_s=1.0, decode_s=1.0, decoded=1, draws=1, steps=1)
    ours = Outcome([[1]], total_s=1.0, decode_s=1.0, decoded=115, draws=100, steps=100, counts=counts)
    cells = [cell.strip() for cell in row_of("chat", 1, [(plain, ours)] * 3, 0.97).strip("|").split("|")]
    assert dict(zip(COLUMNS, cells, strict=True))["mean accepted"] == expected


def test_short_windows_get_short_prompts_of_the_same_kinds() -> None:
    """A token has more than three characters, so there is room for 48 output tokens and a first line."""
    short = kinds_for(256)
    assert short == SHORT_KINDS and kinds_for(2048) == KINDS and list(short) == list(KINDS)
    assert all(len(text) / 3 <= 256 - 48 - 10 for texts in short.values() for text in texts)
    assert all(short[kind] == KINDS[kind] for kind in ("story", "chat"))
