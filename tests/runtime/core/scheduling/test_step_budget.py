"""Prompt tokens of a step with decodes, with one plan in flight and with several."""

from dataclasses import replace

import pytest

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.compose import MIN_PREFILL_TOKENS, prefill_tokens
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import PoolShape, StepResult
from tests.runtime.fake_runner import make_request

MODEL = StepModel(fixed_s=0.001, token_s=0.0001, knee_tokens=0, context_s=0.0, attention_s=0.0)
LIMITS = Limits(max_model_len=2000, max_num_seqs=8, max_num_batched_tokens=1000, itl_target_s=0.041)


@pytest.mark.parametrize(
    ("flights", "decodes", "decodes_in_flight", "tokens"),
    [(1, 0, 0, 1000), (1, 10, 0, 390), (2, 10, 10, 185), (2, 0, 10, 195), (2, 0, 0, 1000), (4, 10, 30, 82)],
    ids=[
        "nothing decodes",
        "one plan",
        "half the target each",
        "a stream waits in the other plan",
        "no stream waits",
        "quarters",
    ],
)
def test_plans_in_flight_share_the_target(flights: int, decodes: int, decodes_in_flight: int, tokens: int) -> None:
    limits = replace(LIMITS, plans_in_flight=flights)
    assert prefill_tokens(limits, MODEL, decodes, 100 * decodes, decodes_in_flight) == pytest.approx(tokens, abs=1)


def test_prompt_chunk_stretches_decodes_not_draft_tokens() -> None:
    """Ten decodes take 2 ms, and forty draft tokens reach the target of 6 ms: prompts get the minimum."""
    limits = replace(LIMITS, itl_target_s=0.006)
    assert prefill_tokens(limits, MODEL, 50, 1000, draft_tokens=40) == MIN_PREFILL_TOKENS
    assert prefill_tokens(limits, MODEL, 50, 1000) == pytest.approx(15, abs=1), "the target cannot hold"


def test_fixed_prefill_cost_leaves_prompts_their_share() -> None:
    """Ten decodes take 20 ms, beyond the target, any prefill 10 ms: prompts get a quarter of 20 ms in addition."""
    model = StepModel(fixed_s=0.019, token_s=0.0001, knee_tokens=0, context_s=0.0, attention_s=0.0, prompt_s=0.010)
    assert prefill_tokens(replace(LIMITS, itl_target_s=0.015), model, 10, 1000) == pytest.approx(50, abs=1)


def test_step_with_draft_tokens_gives_prompts_the_rest() -> None:
    """Eight streams with seven draft tokens each, and a long prompt."""
    speculation = SpeculationConfig(method="ngram", num_tokens=7, is_adaptive=False)
    limits = replace(LIMITS, max_num_seqs=9, itl_target_s=0.0045)
    scheduler = make_scheduler(limits, PoolShape(1000, 4), SchedulerConfig(speculation=speculation))
    for tokens in range(1, 200):
        scheduler.fit.add(StepWork(tokens, 0, 0), MODEL.predict(StepWork(tokens, 0, 0)))
    for row in range(8):
        assert scheduler.submit(row, make_request([row, 20 + row, 30, 40 + row] * 5, 50)) is None
    plan = scheduler.schedule()
    assert plan is not None and len(plan.draws) == 8
    scheduler.commit(StepResult(step=plan.step, tokens=list(range(8))))
    assert scheduler.submit(8, make_request(1500, 1)) is None
    step = scheduler.schedule()
    assert step is not None
    num_drafted = sum(step.depths)
    assert num_drafted > 30
    assert sum(step.counts) - 8 - num_drafted == MIN_PREFILL_TOKENS


@pytest.mark.parametrize("flights", [1, 2])
def test_prompt_and_stream_in_different_plans_meet_the_target(flights: int) -> None:
    scheduler = make_scheduler(replace(LIMITS, plans_in_flight=flights), PoolShape(1000, 4))
    for tokens in range(1, 200):
        scheduler.fit.add(StepWork(tokens, 0, 0), MODEL.predict(StepWork(tokens, 0, 0)))
    assert scheduler.submit(1, make_request(1, 50)) is None
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepResult(step=plan.step, tokens=[7]))
    if flights == 2:
        assert scheduler.schedule() is not None, "the stream's next token"
    assert scheduler.submit(2, make_request(1500, 1)) is None
    step = scheduler.schedule()
    assert step is not None
    assert (len(step.rows), sum(step.counts)) == pytest.approx({1: (2, 400), 2: (1, 195)}[flights], rel=0.05)
