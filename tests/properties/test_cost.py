"""The step-time function and its fit: monotone, never negative, found again through noise, pauses and a change."""

import random
from dataclasses import astuple, replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.cost import (
    FORGETTING_FACTOR,
    KNEES,
    MAX_TIME_RATIO,
    MIN_SAMPLES,
    NUM,
    RIDGE,
    SCALES,
    StepFit,
    StepModel,
    StepWork,
    hang_timeout_s,
    step_work,
)
from phalanx_router.routing.view_builder import scale_model

MODELS = st.builds(
    StepModel,
    fixed_s=st.floats(1e-5, 0.05),
    token_s=st.floats(1e-6, 0.01),
    knee_tokens=st.sampled_from([0, 8, 32, 128]),
    context_s=st.floats(0, 1e-5),
    attention_s=st.floats(0, 1e-6),
    row_s=st.floats(0, 0.01),
    prompt_s=st.floats(0, 0.05),
)


def random_work(rng: random.Random) -> StepWork:
    decodes = [rng.randrange(10, 1500) for _ in range(rng.randrange(1, 40))]
    chunks = [(rng.randrange(1000), rng.randrange(1, 256)) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    return step_work(decodes, chunks)


def test_step_work_is_the_sum_of_its_parts() -> None:
    assert step_work([10, 20], [(0, 8), (100, 4)]) == StepWork(12, 2, 10 + 20 + 8 + 104, 8 * 4 + 4 * 102)


def test_step_below_the_knee_costs_as_much() -> None:
    model = StepModel(fixed_s=0.001, token_s=0.01, knee_tokens=8, context_s=0.0, attention_s=0.0)
    assert model.predict(StepWork(0, 1, 0)) == model.predict(StepWork(4, 4, 0)) == pytest.approx(0.081)
    assert model.predict(StepWork(8, 4, 0)) == pytest.approx(0.121)


@given(MODELS, st.integers(0, 4000), st.integers(0, 64), st.integers(0, 100_000))
def test_step_with_prompts_has_a_minimum_cost(model: StepModel, prefill: int, decodes: int, context: int) -> None:
    work = StepWork(prefill, decodes, context, 10.0 * prefill)
    without = replace(model, prompt_s=0.0).predict(work)
    assert model.predict(work) == pytest.approx(without + (model.prompt_s if prefill else 0.0))


@given(MODELS, st.integers(5, 8))
def test_coefficients_round_trip_and_older_ones_have_defaults(model: StepModel, known: int) -> None:
    numbers = list(map(float, astuple(model)))
    read = StepModel.from_coefficients(numbers[:known])
    assert read is not None
    assert list(astuple(read)) == numbers[:known] + [0.0] * (8 - known)
    assert StepModel.from_coefficients([*numbers, 7.0]) == model, "a later engine reports more coefficients"


@pytest.mark.parametrize(
    "numbers", [[], [0.1] * 4, [-1.0, 1, 0, 0, 0], [0.0] * 8, [0.1, 0.1, 0, 0, float("nan")], [float("inf"), 0.1, 0, 0, 0]]
)
def test_invalid_cost_function_is_refused(numbers: list[float]) -> None:
    assert StepModel.from_coefficients(numbers) is None


@given(MODELS, st.integers(0, 64), st.integers(0, 2000), st.floats(0.001, 2))
def test_prefill_limit_is_tight(model: StepModel, decodes: int, mean: int, limit_s: float) -> None:
    prefill = model.prefill_within(limit_s, decodes, decodes * mean)
    context = mean if decodes else 0

    def takes(tokens: int) -> float:
        return model.predict(StepWork(tokens, decodes, decodes * mean, float(tokens * context)))

    assert prefill == 0 or takes(prefill) <= limit_s * (1 + 1e-9)
    assert takes(prefill + 1) >= limit_s * (1 - 1e-9)


@pytest.mark.parametrize("knee", [0, 32, 128])
def test_the_fit_finds_the_function_through_noise_and_pauses(knee: int) -> None:
    rng = random.Random(knee)
    truth = StepModel(fixed_s=0.005, token_s=0.0008, knee_tokens=knee, context_s=2e-7, attention_s=3e-8)
    fit = StepFit()
    for _ in range(600):
        work = random_work(rng)
        pause = 20 if rng.random() < 0.01 else 1
        fit.add(work, truth.predict(work) * rng.uniform(0.95, 1.05) * pause)
    model = fit.model()
    assert model is not None
    errors = []
    for _ in range(100):
        work = random_work(rng)
        errors.append(abs(model.predict(work) / truth.predict(work) - 1))
    assert sum(errors) / len(errors) < 0.08
    assert 0 < model.error < 0.1


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_fit_follows_a_machine_that_changed_speed(factor: float) -> None:
    rng = random.Random(11)
    first = StepModel(fixed_s=0.005, token_s=0.0008, knee_tokens=32, context_s=2e-7, attention_s=3e-8)
    fit = StepFit()
    for truth in (first, scale_model(first, factor)):
        for _ in range(800):
            work = random_work(rng)
            fit.add(work, truth.predict(work) * rng.uniform(0.95, 1.05))
        model = fit.model()
        assert model is not None
        works = [random_work(rng) for _ in range(100)]
        assert fmean(abs(model.predict(work) / truth.predict(work) - 1) for work in works) < 0.08


def test_fit_recovers_the_fixed_cost_of_prompts() -> None:
    rng = random.Random(5)
    truth = StepModel(fixed_s=0.005, token_s=0.0002, knee_tokens=0, context_s=2e-7, attention_s=0.0, row_s=0.0005, prompt_s=0.02)
    fit = StepFit()
    for _ in range(800):
        work = random_work(rng)
        fit.add(work, truth.predict(work) * rng.uniform(0.98, 1.02))
    model = fit.model()
    assert model is not None
    assert model.prompt_s == pytest.approx(truth.prompt_s, rel=0.15)
    assert model.error < 0.04


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 512), st.integers(0, 64), st.floats(-1, 100)), min_size=1, max_size=60))
def test_coefficients_are_finite_and_never_negative(steps: list[tuple[int, int, float]]) -> None:
    fit = StepFit()
    for prefill, decodes, wall_s in steps:
        fit.add(StepWork(prefill, decodes, 100 * decodes + prefill, float(prefill * prefill)), wall_s)
    model = fit.model()
    if model is not None:
        predicted = model.predict(StepWork(64, 8, 800, 100.0))
        assert 0 <= predicted < 1e9
        assert min(astuple(model)) >= 0


def reference_coefficients(steps: list[tuple[StepWork, float]], knee: int) -> tuple[list[float], float]:
    """Fits one knee as the module describes it, entry by entry. Returns the scaled coefficients and the error."""
    sums, moments, scaled, error = [[0.0] * NUM for _ in range(NUM)], [0.0] * NUM, [0.0] * NUM, 0.0
    for number, (work, wall_s) in enumerate(steps):
        tokens, has_prompt = max(knee, work.prefill_tokens + work.decodes), work.prefill_tokens > 0
        raw = (1.0, tokens, work.context_tokens, work.prefill_context, work.decodes, has_prompt)
        features = [scale * value for scale, value in zip(SCALES, raw, strict=True)]
        predicted_s = sum(a * b for a, b in zip(scaled, features, strict=True))
        if number >= MIN_SAMPLES:
            wall_s = min(wall_s, MAX_TIME_RATIO * predicted_s) if predicted_s > 0 else wall_s
            error += 0.02 * (abs(predicted_s - wall_s) / wall_s - error)
        for row in range(NUM):
            x = 1.0 / (wall_s * wall_s) * features[row]
            for column in range(NUM):
                sums[row][column] = FORGETTING_FACTOR * sums[row][column] + x * features[column]
            moments[row] = FORGETTING_FACTOR * moments[row] + x * wall_s
        for _ in range(4):
            for row in range(NUM):
                own = sums[row][row]
                products = 0.0
                for a, b in zip(sums[row], scaled, strict=True):  # `sum` rounds otherwise from Python 3.12 on
                    products += a * b
                others = products - own * scaled[row]
                scaled[row] = max(0.0, (moments[row] - others) / (own + RIDGE)) if own > 0 else 0.0
    return scaled, error


@pytest.mark.parametrize("seed", range(4))
def test_fit_equals_its_reference_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    decodes_only = [step_work([rng.randrange(10, 1500)], []) for _ in range(30)]
    works = decodes_only * (seed % 2) + [random_work(rng) for _ in range(120)]
    steps = [(work, rng.uniform(0.01, 0.3)) for work in works]
    fit = StepFit()
    for count, (work, wall_s) in enumerate(steps, 1):
        fit.add(work, wall_s)
        if count < MIN_SAMPLES or (count % 30 and count > MIN_SAMPLES + 1):
            continue
        model, found = fit.model(), [reference_coefficients(steps[:count], knee) for knee in KNEES]
        best = min(range(len(KNEES)), key=lambda i: found[i][1])
        fixed, token, context, attention, row, prompt = (a * b for a, b in zip(found[best][0], SCALES, strict=True))
        assert model is not None
        assert astuple(model) == (fixed, token, KNEES[best], context, attention, found[best][1], row, prompt)
        assert fit.model() is model, "it is built once a step"


def test_few_steps_give_no_function() -> None:
    fit = StepFit()
    for _ in range(MIN_SAMPLES - 1):
        fit.add(StepWork(0, 1, 10), 0.01)
    assert fit.model() is None
    fit.add(StepWork(0, 1, 10), 0.01)
    model = fit.model()
    assert model is not None
    assert model.predict(StepWork(0, 1, 10)) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("predicted_s", "after_s"), [(None, 10.0), (0.1, 10.0), (3.0, 15.0)])
def test_step_hangs_after_ten_seconds_or_five_times_expected(predicted_s: float | None, after_s: float) -> None:
    assert hang_timeout_s(predicted_s) == after_s
