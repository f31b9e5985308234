"""Estimates of `GroupView`."""

from dataclasses import replace

import pytest

from phalanx_api.cost import StepModel, attention_work
from tests.router.views import make_group_view

MODEL = StepModel(fixed_s=0.01, token_s=1e-4, knee_tokens=0, context_s=0.0, attention_s=0.0)


def test_prompt_waits_for_the_queue_and_its_missing_pages() -> None:
    view = make_group_view("g", step_model=MODEL, max_num_batched_tokens=100, queued_prompt_tokens=1000)
    assert view.token_s == pytest.approx(2e-4)  # 0.01 s and 100 tokens of 1e-4 s, over 100 tokens
    assert view.backlog_s == pytest.approx(0.2)
    assert view.prompt_s(500) == pytest.approx(0.1)
    assert view.prompt_s(500, 300) == pytest.approx(0.04)
    assert view.prompt_s(500, 500) == view.prompt_s(1) == view.token_s, "the last token is computed whatever pages hold"


def test_attention_makes_one_long_prompt_cost_more() -> None:
    attends = replace(MODEL, attention_s=1e-6)
    plain = make_group_view("g", step_model=MODEL, max_num_batched_tokens=100)
    one = make_group_view(
        "g",
        step_model=attends,
        max_num_batched_tokens=100,
        speed=2.0,
        queued_prompt_tokens=1000,
        queued_attention=attention_work(1000),
    )
    many = replace(one, load=replace(one.load, queued_attention=10 * attention_work(100)))
    assert one.backlog_s == pytest.approx(2 * (1000 * plain.token_s + 0.5))
    assert many.backlog_s == pytest.approx(2 * (1000 * plain.token_s + 0.05))
    assert one.prompt_s(1000) == pytest.approx(one.backlog_s)
    assert one.prompt_s(1000, 600) == pytest.approx(2 * (400 * plain.token_s + 1e-6 * (1000**2 - 600**2) / 2))


def test_a_slow_group_costs_more_in_everything() -> None:
    usual, slow = (make_group_view("g", step_model=MODEL, speed=s, queued_prompt_tokens=10, running=4) for s in (1.0, 2.0))
    assert slow.itl_s == pytest.approx(2 * usual.itl_s)
    assert slow.backlog_s == pytest.approx(2 * usual.backlog_s)
    assert slow.prompt_s(7) == pytest.approx(2 * usual.prompt_s(7))


def test_pressure_counts_used_promised_and_wanted_pages() -> None:
    assert make_group_view("g", total_pages=100, used_pages=50, reserved_pages=10, demand_pages=60).pressure == pytest.approx(1.2)


def test_several_tokens_per_step_lower_the_itl() -> None:
    usual, fast = (make_group_view("g", step_model=MODEL, running=4, context_tokens=400, speedup=s) for s in (1.0, 2.0))
    assert fast.step_s == usual.step_s == usual.itl_s
    assert fast.itl_s == usual.itl_s / 2
    assert fast.itl_with_s(100) == pytest.approx(usual.itl_with_s(100) / 2)
