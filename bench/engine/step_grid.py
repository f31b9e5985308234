"""Which steps are timed to fit the step-time function, and how well it foretells those that the fit has not seen. No engine here.

A point is one step: so many decodes, each with so much context, and a prompt chunk beside them. The fit is `StepFit`, as in the
engine, fed with points in a random order. Each point is held out once: of four fits each knows three quarters of them, and
foretells the rest. The time of a point is the lower quartile of its rounds: other programs only make a step longer.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from bench.frame.figures import percentile
from phalanx_api.cost import StepFit, StepModel, StepWork, describe

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (32, 128, 512, 2048, 8192)
PROMPTS = (16, 64, 256, 1024, 4096)
STARTS = (0, 512, 4096)
MIXED_BATCHES, MIXED_CONTEXTS, MIXED_PROMPTS = (4, 16, 64), (32, 512), (16, 64, 256)
"""Prompt chunks beside decodes."""
FOLDS = 4
TIMES_LEARNT = 4
"""How often the fit is given each point, so that the first ones, which it forgets, are few beside all."""
MEDIAN_BOUND, P95_BOUND = 0.05, 0.10
"""Relative errors on points held out that a simulation may rest on (balancing.md, 4.1)."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step: decodes that have `context` tokens each after it, and a chunk of `prompt` tokens from position `start`."""

    decodes: int
    context: int
    prompt: int
    start: int

    @property
    def work(self) -> StepWork:
        """What it computes."""
        return describe([self.context] * self.decodes, [(self.start, self.prompt)] if self.prompt else [])

    def num_pages(self, page_size: int) -> int:
        """Pages that its requests hold."""
        own = -(-self.context // page_size) * self.decodes
        return own + (-(-(self.start + self.prompt) // page_size) if self.prompt else 0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an engine can hold: rows and tokens of a step, tokens of a request, pages."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int

    def holds(self, point: Point) -> bool:
        """Whether this step can be."""
        rows = point.decodes + (point.prompt > 0)
        longest = max(point.context if point.decodes else 0, point.start + point.prompt)
        return (
            0 < rows <= self.max_num_seqs
            and point.decodes + point.prompt <= self.max_num_batched_tokens
            and longest <= self.max_model_len
            and point.num_pages(self.page_size) <= self.num_pages
        )


def make_grid(bounds: Bounds) -> list[Point]:
    """Every step of the grid that the engine can hold."""
    decodes = [Point(batch, context, 0, 0) for batch, context in product(BATCHES, CONTEXTS)]
    prompts = [Point(0, 0, prompt, start) for prompt, start in product(PROMPTS, STARTS)]
    mixed = [Point(batch, context, prompt, 0) for batch, context, prompt in product(MIXED_BATCHES, MIXED_CONTEXTS, MIXED_PROMPTS)]
    return [point for point in decodes + prompts + mixed if bounds.holds(point)]


def typical_s(walls: Sequence[float]) -> float:
    """The time of a step that other programs did not disturb much."""
    return percentile(walls, 25)


def folds(points: Sequence[Point], chance: random.Random) -> list[list[Point]]:
    """The points in as many parts as are held out in turn."""
    shuffled = list(points)
    chance.shuffle(shuffled)
    return [shuffled[place::FOLDS] for place in range(FOLDS)]


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted times, over points."""

    num_points: int
    median: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """The function of all points and how it does on them, and how those do that did not know a point."""

    model: StepModel
    fitted: Errors
    held_out: Errors

    @property
    def is_good(self) -> bool:
        """Whether a simulation may rest on it."""
        return self.held_out.median <= MEDIAN_BOUND and self.held_out.p95 <= P95_BOUND


def fit(times_s: dict[Point, list[float]], seed: int = 0) -> Fitted:
    """Fits the times of each point, one in each round. Raises ValueError for too few points."""
    chance = random.Random(seed)
    points = sorted(times_s, key=lambda point: (point.decodes, point.context, point.prompt, point.start))
    held_out: list[float] = []
    for fold in folds(points, chance):
        known = [point for point in points if point not in fold]
        held_out += errors_of(learnt(known, times_s, chance), fold, times_s)
    model = learnt(points, times_s, chance)
    return Fitted(model, summed_up(errors_of(model, points, times_s)), summed_up(held_out))


def learnt(points: Sequence[Point], times_s: dict[Point, list[float]], chance: random.Random) -> StepModel:
    """The function by these points. Raises ValueError for too few."""
    samples = [(point.work, typical_s(times_s[point])) for point in points for _ in range(TIMES_LEARNT)]
    chance.shuffle(samples)
    learner = StepFit()
    for work, wall_s in samples:
        learner.add(work, wall_s)
    model = learner.model()
    if model is None:
        raise ValueError(f"{len(times_s)} points are too few to fit and to hold some out")
    return model


def errors_of(model: StepModel, points: Sequence[Point], times_s: dict[Point, list[float]]) -> list[float]:
    """How far the function is from the time of each of these points."""
    took_s = {point: typical_s(times_s[point]) for point in points}
    return [abs(model.predict(point.work) - took_s[point]) / took_s[point] for point in points]


def summed_up(errors: Sequence[float]) -> Errors:
    """What these errors come to."""
    return Errors(len(errors), percentile(errors, 50), percentile(errors, 95), max(errors))


def report(fitted: Fitted, times_s: dict[Point, list[float]], about: dict[str, object]) -> dict[str, object]:
    """What the command writes; `read_model` reads it."""
    points = [
        {
            **asdict(point),
            "took_s": typical_s(walls),
            "median_s": percentile(walls, 50),
            "predicted_s": fitted.model.predict(point.work),
        }
        for point, walls in times_s.items()
    ]
    return {
        **about,
        "step_model": asdict(fitted.model),
        "errors": {
            "fitted": asdict(fitted.fitted),
            "held_out": asdict(fitted.held_out),
            "bounds": {"median": MEDIAN_BOUND, "p95": P95_BOUND},
            "within_bounds": fitted.is_good,
        },
        "points": points,
    }


def read_model(path: Path) -> StepModel:
    """The step-time function that `bench.engine.step_fit` wrote. Raises ValueError for another file."""
    content = json.loads(path.read_text())
    try:
        return StepModel(**content["step_model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no step_model: {error!r}") from error
