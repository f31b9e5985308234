from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.core.admission import Limits, Refusal, can_start, check_length, check_queue
from phalanx_runtime.core.step_plan import PoolShape

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, max_waiting=2)


@pytest.mark.parametrize(
    ("num_prompt", "code"),
    [(0, "empty_prompt"), (64, "context_length_exceeded"), (65, "context_length_exceeded")],
    ids=["empty", "no room for an output token", "longer than the model"],
)
def test_impossible_prompt_is_refused_with_400(num_prompt: int, code: str) -> None:
    refusal = check_length(num_prompt, LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code, refusal.backlog_tokens) == (400, code, None)


def test_the_longest_prompt_that_fits_is_admitted() -> None:
    assert check_length(63, LIMITS) is None


def test_the_pool_bounds_the_length_of_a_request() -> None:
    assert LIMITS.within(PoolShape(3, 16)).max_model_len == 48
    assert LIMITS.within(PoolShape(30, 16)).max_model_len == 64


def test_a_full_queue_refuses_with_429_and_its_backlog() -> None:
    assert check_queue(1, 500, LIMITS) is None
    tight = replace(LIMITS, max_waiting_tokens=500)
    assert check_queue(0, 500, tight) is check_queue(1, 499, tight) is None
    assert isinstance(check_queue(1, 500, tight), Refusal)
    refusal = check_queue(2, 500, LIMITS)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code, refusal.backlog_tokens) == (429, "queue_full", 500)


@pytest.mark.parametrize(
    ("context_pages", "free_pages", "free_rows", "num_running", "can_start_now"),
    [
        (4, 4, 1, 0, True),
        (4, 3, 1, 0, False),
        (4, 9, 0, 5, False),
        (4, 6, 1, 2, True),
        (4, 5, 1, 2, False),
    ],
    ids=["alone takes all pages", "too few pages", "no row", "room for all to grow", "no room to grow"],
)
def test_start_needs_a_row_and_room_to_grow(
    context_pages: int, free_pages: int, free_rows: int, num_running: int, can_start_now: bool
) -> None:
    assert can_start(context_pages, free_pages, free_rows, num_running) == can_start_now


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Limits(**sizes)


def test_a_budget_below_the_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=3)


@pytest.mark.parametrize(("stages", "is_async", "flights"), [(1, False, 1), (1, True, 2), (3, False, 3), (3, True, 3)])
def test_pipeline_stages_are_filled_by_other_requests(stages: int, is_async: bool, flights: int) -> None:
    limits = replace(LIMITS, plans_in_flight=stages, async_scheduling=is_async)
    assert (limits.max_flights, limits.runs_ahead) == (flights, flights == 2)


def test_drafts_turn_asynchronous_scheduling_off() -> None:
    config = EngineConfig(async_scheduling=True)
    assert Limits.of(config, 64).runs_ahead
    assert not Limits.of(replace(config, speculative_method="ngram"), 64).runs_ahead
