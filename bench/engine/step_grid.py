"""Grid of steps for fitting the step-time function, and the fit's error on held-out points.

A point is one step: decodes with equal contexts and optionally a prompt chunk. The fit is the engine's `StepFit`, fed in random
order. Each point is held out once: each of four fits predicts the quarter of points that it did not get. The time of a point is
the lower quartile of its rounds, because other load only makes a step longer.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from bench.frame.figures import percentile
from phalanx_api.cost import StepFit, StepModel, StepWork, step_work

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (32, 128, 512, 2048, 8192)
PROMPTS = (16, 64, 256, 1024, 4096)
STARTS = (0, 512, 4096)
MIXED_BATCHES, MIXED_CONTEXTS, MIXED_PROMPTS = (4, 16, 64), (32, 512), (16, 64, 256)
"""Prompt chunks in steps with decodes."""
FOLDS = 4
REPETITIONS = 4
"""Times that the fit gets each point, because it forgets the first ones."""
MEDIAN_BOUND, P95_BOUND = 0.05, 0.10
"""Maximum relative errors on held-out points for use in the simulator."""


@dataclass(frozen=True, slots=True)
class Point:
    decodes: int
    context: int  # tokens of each decode after the step
    prompt: int  # tokens of the prompt chunk; 0 without one
    start: int  # first position of the chunk

    @property
    def work(self) -> StepWork:
        return step_work([self.context] * self.decodes, [(self.start, self.prompt)] if self.prompt else [])

    def num_pages(self, page_size: int) -> int:
        decode_pages = -(-self.context // page_size) * self.decodes
        return decode_pages + (-(-(self.start + self.prompt) // page_size) if self.prompt else 0)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int

    def fits(self, point: Point) -> bool:
        rows = point.decodes + (point.prompt > 0)
        longest = max(point.context if point.decodes else 0, point.start + point.prompt)
        return (
            0 < rows <= self.max_num_seqs
            and point.decodes + point.prompt <= self.max_num_batched_tokens
            and longest <= self.max_model_len
            and point.num_pages(self.page_size) <= self.num_pages
        )


def make_grid(limits: EngineLimits) -> list[Point]:
    decodes = [Point(batch, context, 0, 0) for batch, context in product(BATCHES, CONTEXTS)]
    prompts = [Point(0, 0, prompt, start) for prompt, start in product(PROMPTS, STARTS)]
    mixed = [Point(batch, context, prompt, 0) for batch, context, prompt in product(MIXED_BATCHES, MIXED_CONTEXTS, MIXED_PROMPTS)]
    return [point for point in decodes + prompts + mixed if limits.fits(point)]


def typical_s(walls: Sequence[float]) -> float:
    """Returns the lower quartile of the times."""
    return percentile(walls, 25)


def folds(points: Sequence[Point], rng: random.Random) -> list[list[Point]]:
    shuffled = list(points)
    rng.shuffle(shuffled)
    return [shuffled[fold::FOLDS] for fold in range(FOLDS)]


@dataclass(frozen=True, slots=True)
class Errors:
    num_points: int
    median: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True)
class FitResult:
    model: StepModel  # of all points
    fitted: Errors  # of `model`
    held_out: Errors  # of functions fitted without the point

    @property
    def is_good(self) -> bool:
        return self.held_out.median <= MEDIAN_BOUND and self.held_out.p95 <= P95_BOUND


def fit(times_s: dict[Point, list[float]], seed: int = 0) -> FitResult:
    """Fits the times of each point, one per round. Raises ValueError for too few points."""
    rng = random.Random(seed)
    points = sorted(times_s, key=lambda point: (point.decodes, point.context, point.prompt, point.start))
    held_out: list[float] = []
    for fold in folds(points, rng):
        training = [point for point in points if point not in fold]
        held_out += relative_errors(fit_points(training, times_s, rng), fold, times_s)
    model = fit_points(points, times_s, rng)
    return FitResult(model, summarise(relative_errors(model, points, times_s)), summarise(held_out))


def fit_points(points: Sequence[Point], times_s: dict[Point, list[float]], rng: random.Random) -> StepModel:
    """Returns the function fitted to these points. Raises ValueError for too few points."""
    samples = [(point.work, typical_s(times_s[point])) for point in points for _ in range(REPETITIONS)]
    rng.shuffle(samples)
    step_fit = StepFit()
    for work, wall_s in samples:
        step_fit.add(work, wall_s)
    model = step_fit.model()
    if model is None:
        raise ValueError(f"{len(times_s)} points are too few to fit and to hold some out")
    return model


def relative_errors(model: StepModel, points: Sequence[Point], times_s: dict[Point, list[float]]) -> list[float]:
    times = {point: typical_s(times_s[point]) for point in points}
    return [abs(model.predict(point.work) - times[point]) / times[point] for point in points]


def summarise(errors: Sequence[float]) -> Errors:
    return Errors(len(errors), percentile(errors, 50), percentile(errors, 95), max(errors))


def report(result: FitResult, times_s: dict[Point, list[float]], facts: dict[str, object]) -> dict[str, object]:
    """Returns the fit as JSON for `read_model`."""
    points = [
        {
            **asdict(point),
            "took_s": typical_s(walls),
            "median_s": percentile(walls, 50),
            "predicted_s": result.model.predict(point.work),
        }
        for point, walls in times_s.items()
    ]
    return {
        **facts,
        "step_model": asdict(result.model),
        "errors": {
            "fitted": asdict(result.fitted),
            "held_out": asdict(result.held_out),
            "bounds": {"median": MEDIAN_BOUND, "p95": P95_BOUND},
            "within_bounds": result.is_good,
        },
        "points": points,
    }


def read_model(path: Path) -> StepModel:
    """Reads the step-time function that `bench.engine.step_fit` wrote. Raises ValueError for another file."""
    content = json.loads(path.read_text())
    try:
        return StepModel(**content["step_model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} contains no step_model: {error!r}") from error
