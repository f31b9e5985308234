"""How many prompt tokens a step gets beside decodes, with one plan in flight and with several."""

from dataclasses import replace

import pytest

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.compose import LEAST_TOKENS, prefill_tokens
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import PoolShape, StepResult
from tests.runtime.fake_runner import make_request

MODEL = StepModel(fixed_s=0.001, token_s=0.0001, knee_tokens=0, context_s=0.0, attention_s=0.0)
LIMITS = Limits(max_model_len=2000, max_num_seqs=8, max_num_batched_tokens=1000, itl_target_s=0.041)


@pytest.mark.parametrize(
    ("flights", "decodes", "elsewhere", "tokens"),
    [(1, 0, 0, 1000), (1, 10, 0, 390), (2, 10, 10, 185), (2, 0, 10, 195), (2, 0, 0, 1000), (4, 10, 30, 82)],
    ids=["nothing decodes", "one plan", "half the target each", "a stream in the other plan waits too", "none waits", "quarters"],
)
def test_plans_in_flight_share_the_target(flights: int, decodes: int, elsewhere: int, tokens: int) -> None:
    limits = replace(LIMITS, plans_in_flight=flights)
    assert prefill_tokens(limits, MODEL, decodes, 100 * decodes, elsewhere) == pytest.approx(tokens, abs=1)


def test_prompt_chunk_stretches_decodes_not_draft_tokens() -> None:
    """Ten decodes take 2 ms, and forty proposals reach the target of 6 ms: prompts get the few tokens that they always get."""
    limits = replace(LIMITS, itl_target_s=0.006)
    assert prefill_tokens(limits, MODEL, 50, 1000, proposals=40) == LEAST_TOKENS
    assert prefill_tokens(limits, MODEL, 50, 1000) == pytest.approx(15, abs=1), "decodes that the target cannot hold"


def test_fixed_prefill_cost_leaves_prompts_their_share() -> None:
    """Ten decodes take 20 ms, which the target cannot hold, any prompt tokens 10: they get a quarter of 20 ms beside it."""
    model = StepModel(fixed_s=0.019, token_s=0.0001, knee_tokens=0, context_s=0.0, attention_s=0.0, prompt_s=0.010)
    assert prefill_tokens(replace(LIMITS, itl_target_s=0.015), model, 10, 1000) == pytest.approx(50, abs=1)


def test_step_with_draft_tokens_gives_prompts_the_rest() -> None:
    """Eight streams with seven proposals each, whatever pays, and a long prompt."""
    how = SpeculationConfig(method="ngram", num_tokens=7, is_adaptive=False)
    limits = replace(LIMITS, max_num_seqs=9, itl_target_s=0.0045)
    scheduler = Scheduler(limits, PoolShape(1000, 4), speculating=how)
    for tokens in range(1, 200):
        scheduler.fit.add(StepWork(tokens, 0, 0), MODEL.predict(StepWork(tokens, 0, 0)))
    for row in range(8):
        assert scheduler.submit(row, make_request([row, 20 + row, 30, 40 + row] * 5, 50)) is None
    plan = scheduler.schedule()
    assert plan is not None and len(plan.draws) == 8
    scheduler.commit(StepResult(step=plan.step, tokens=list(range(8))))
    assert scheduler.submit(8, make_request(1500, 1)) is None
    beside = scheduler.schedule()
    assert beside is not None
    proposals = sum(beside.depths)
    assert proposals > 30
    assert sum(beside.counts) - 8 - proposals == LEAST_TOKENS


@pytest.mark.parametrize("flights", [1, 2])
def test_prompt_and_stream_in_different_plans_meet_the_target(flights: int) -> None:
    scheduler = Scheduler(replace(LIMITS, plans_in_flight=flights), PoolShape(1000, 4))
    for tokens in range(1, 200):
        scheduler.fit.add(StepWork(tokens, 0, 0), MODEL.predict(StepWork(tokens, 0, 0)))
    assert scheduler.submit(1, make_request(1, 50)) is None
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepResult(step=plan.step, tokens=[7]))
    if flights == 2:
        assert scheduler.schedule() is not None, "the stream's next token"
    assert scheduler.submit(2, make_request(1500, 1)) is None
    beside = scheduler.schedule()
    assert beside is not None
    assert (len(beside.rows), sum(beside.counts)) == pytest.approx({1: (2, 400), 2: (1, 195)}[flights], rel=0.05)
