"""What follows from the numbers of a group."""

import pytest

from phalanx_api.cost import StepModel
from phalanx_router.route.view import GroupView

MODEL = StepModel(fixed_s=0.01, token_s=1e-4, knee_tokens=0, context_s=0.0, attention_s=0.0)


def test_a_prompt_waits_for_what_is_queued_and_costs_what_is_missing() -> None:
    view = GroupView("g", model=MODEL, room=100, queued_prompt_tokens=1000)
    assert view.token_s == pytest.approx(2e-4)  # 0.01 s and 100 tokens of 1e-4 s, over 100 tokens
    assert view.backlog_s == pytest.approx(0.2)
    assert view.ttft_s(500) == pytest.approx(0.3)


def test_a_slow_group_costs_more_in_everything() -> None:
    usual, slow = (GroupView("g", model=MODEL, speed=s, queued_prompt_tokens=10, running=4) for s in (1.0, 2.0))
    assert slow.itl_s == pytest.approx(2 * usual.itl_s)
    assert slow.ttft_s(7) == pytest.approx(2 * usual.ttft_s(7))


def test_pressure_counts_what_is_used_promised_and_wanted() -> None:
    assert GroupView("g", total_pages=100, used_pages=50, reserved_pages=10, demand_pages=60).pressure == pytest.approx(1.2)


def test_tokens_that_come_several_a_step_are_nearer_to_one_another() -> None:
    usual, fast = (GroupView("g", model=MODEL, running=4, context_tokens=400, speedup=s) for s in (1.0, 2.0))
    assert fast.step_s == usual.step_s == usual.itl_s
    assert fast.itl_s == usual.itl_s / 2
    assert fast.grown_itl_s(100) == pytest.approx(usual.grown_itl_s(100) / 2)
