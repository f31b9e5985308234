from dataclasses import replace

import pytest

from phalanx_runtime.core.admission import Admit, Limits, Refuse, Wait, fits_ever, fits_now, may_wait
from phalanx_runtime.core.step_plan import PoolShape

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, max_waiting=2)


@pytest.mark.parametrize(
    ("num_prompt", "code"),
    [(0, "empty_prompt"), (64, "context_length_exceeded"), (65, "context_length_exceeded")],
    ids=["empty", "no room for an output token", "longer than the model"],
)
def test_impossible_prompt_is_refused_with_400(num_prompt: int, code: str) -> None:
    answer = fits_ever(num_prompt, LIMITS)
    assert isinstance(answer, Refuse)
    assert (answer.status, answer.code, answer.backlog_tokens) == (400, code, None)


def test_the_longest_prompt_that_fits_is_admitted() -> None:
    assert fits_ever(63, LIMITS) == Admit()


def test_the_pool_bounds_the_length_of_a_request() -> None:
    assert LIMITS.within(PoolShape(3, 16)).max_model_len == 48
    assert LIMITS.within(PoolShape(30, 16)).max_model_len == 64


def test_a_full_queue_refuses_with_429_and_its_backlog() -> None:
    assert may_wait(1, 500, LIMITS) == Wait()
    tight = replace(LIMITS, max_waiting_tokens=500)
    assert (may_wait(0, 500, tight), may_wait(1, 499, tight)) == (Wait(), Wait())
    assert isinstance(may_wait(1, 500, tight), Refuse)
    answer = may_wait(2, 500, LIMITS)
    assert isinstance(answer, Refuse)
    assert (answer.status, answer.code, answer.backlog_tokens) == (429, "queue_full", 500)


@pytest.mark.parametrize(
    ("context_pages", "free_pages", "free_rows", "running", "answer"),
    [
        (4, 4, 1, 0, Admit()),
        (4, 3, 1, 0, Wait()),
        (4, 9, 0, 5, Wait()),
        (4, 6, 1, 2, Admit()),
        (4, 5, 1, 2, Wait()),
    ],
    ids=["alone takes all pages", "pages are short", "no row", "room for all to grow", "no room to grow"],
)
def test_fits_now(context_pages: int, free_pages: int, free_rows: int, running: int, answer: Admit | Wait) -> None:
    assert fits_now(context_pages, free_pages, free_rows, running) == answer


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    values = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Limits(**values)


def test_a_budget_below_the_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=3)
