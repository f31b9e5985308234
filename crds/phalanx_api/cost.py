"""The cost model: step-time function and its online fit. All times are seconds.

    t = fixed + token * max(knee, p + B) + row * B + context * C + attention * sum(p_i * c_i) + prompt * [p > 0]

p: prompt tokens, B: decodes, C: sum of context lengths, c_i: mean context of prompt chunk p_i.

Fit: non-negative least squares of relative errors with forgetting, per knee; the best predictor is used.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

KNEES = (0, 8, 32, 128)
"""Candidate knees, in tokens."""
MIN_SAMPLES = 16
"""Steps before the fit is used."""
FORGETTING_FACTOR = 0.995
"""Weight of a step relative to the next: a window of 200 steps."""
MAX_TIME_RATIO = 3.0
"""Upper bound of measured over predicted time, against pauses of the machine."""
SCALES = (1.0, 1e-2, 1e-4, 1e-6, 1e-2, 1.0)
"""Scale all features to about 1, for the ridge."""
NUM = len(SCALES)
RIDGE = 1e-9
SHORTEST_S = 1e-6
HANG_FLOOR_S, HANG_FACTOR = 10.0, 5.0
COEFFICIENTS = ("fixed_s", "token_s", "knee_tokens", "context_s", "attention_s", "error", "row_s", "prompt_s")
"""Fields of `StepModel` in wire order."""
REQUIRED_COEFFICIENTS = 5


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    prefill_context: float = 0.0  # sum over prompt chunks of tokens times mean context


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Coefficients of the step-time function."""

    fixed_s: float
    token_s: float
    knee_tokens: int
    context_s: float
    attention_s: float
    error: float = 0.0  # mean relative error, out of sample
    row_s: float = 0.0
    prompt_s: float = 0.0

    @staticmethod
    def from_coefficients(numbers: Sequence[float]) -> "StepModel | None":
        """Reads coefficients in wire order, if valid. Missing ones are 0."""
        if (
            len(numbers) < REQUIRED_COEFFICIENTS
            or not all(map(math.isfinite, numbers))
            or min(numbers) < 0
            or numbers[0] + numbers[1] <= 0
        ):
            return None
        fields = dict(zip(COEFFICIENTS, numbers, strict=False))
        return StepModel(knee_tokens=int(fields.pop("knee_tokens")), **fields)

    def coefficients(self) -> list[float]:
        """Returns what `from_coefficients` reads."""
        return [getattr(self, name) for name in COEFFICIENTS]

    def predict(self, work: StepWork) -> float:
        """Returns the predicted seconds of a step."""
        tokens = max(self.knee_tokens, work.prefill_tokens + work.decodes)
        linear = self.fixed_s + self.token_s * tokens + self.context_s * work.context_tokens
        linear += self.attention_s * work.prefill_context + self.row_s * work.decodes
        return linear + self.prompt_s if work.prefill_tokens else linear

    def prefill_within(self, limit_s: float, decodes: int, context_tokens: int) -> int:
        """Returns the prompt tokens that fit into a step of `limit_s` with these decodes, at their mean context.

        10^9 without cost per token.
        """
        mean_context = context_tokens / decodes if decodes else 0.0
        per_token_s = self.token_s + self.attention_s * mean_context
        budget_s = limit_s - self.prompt_s - self.predict(StepWork(0, decodes, context_tokens))
        if budget_s < 0:
            return 0
        free_tokens = max(self.knee_tokens - decodes, 0)
        if per_token_s <= 0:
            return 10**9
        free_attention_s = free_tokens * self.attention_s * mean_context
        if budget_s < free_attention_s:
            return int(budget_s / (self.attention_s * mean_context))
        return free_tokens + int((budget_s - free_attention_s) / per_token_s)


def attention_work(tokens: int, cached: int = 0) -> float:
    """Returns the sum of context lengths of a request's tokens after the first `cached`."""
    return (tokens * tokens - cached * cached) / 2


def hang_timeout_s(predicted_s: float | None) -> float:
    """Returns the step time that counts as a hang."""
    return max(HANG_FLOOR_S, HANG_FACTOR * predicted_s) if predicted_s is not None else HANG_FLOOR_S


def step_work(decodes: Iterable[int], chunks: Iterable[tuple[int, int]], drafts: Iterable[tuple[int, int]] = ()) -> StepWork:
    """Sums the work of a step. `decodes`: context of each; `chunks`: (start, count); `drafts`: (context, draft tokens)."""
    num_decodes = context = prefill = 0
    attention = 0.0
    for length in decodes:
        num_decodes += 1
        context += length
    for start, count in chunks:
        prefill += count
        context += start + count
        attention += count * (start + count / 2)
    for length, count in drafts:
        num_decodes += count
        attention += count * length
    return StepWork(prefill, num_decodes, context, attention)


class StepFit:
    """Fits a `StepModel` to measured steps."""

    __slots__ = ("_candidates", "_model", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._candidates = [_Candidate(knee) for knee in KNEES]
        self._model: StepModel | None = None
        """Since the latest step, if it was read."""

    def add(self, work: StepWork, wall_s: float) -> None:
        """Learns one step, unless the clock did not advance."""
        if wall_s < SHORTEST_S:
            return
        is_fitted = self.num_steps >= MIN_SAMPLES
        self.num_steps += 1
        self._model = None
        for candidate in self._candidates:
            candidate.learn(work, wall_s, is_fitted)

    def model(self) -> StepModel | None:
        """Returns the fit after `MIN_SAMPLES` steps."""
        if self.num_steps < MIN_SAMPLES:
            return None
        if self._model is None:
            self._model = min(self._candidates, key=lambda candidate: candidate.error).model()
        return self._model


class _Candidate:
    """Fit for one knee: normal equations, solved by projected Gauss-Seidel."""

    __slots__ = ("_moments", "_scaled", "_sums", "error", "knee")

    def __init__(self, knee: int) -> None:
        self.knee = knee
        self.error = 0.0
        self._sums = [[0.0] * NUM for _ in range(NUM)]
        self._moments = [0.0] * NUM
        self._scaled = [0.0] * NUM

    def learn(self, work: StepWork, wall_s: float, is_fitted: bool) -> None:
        tokens = max(self.knee, work.prefill_tokens + work.decodes)
        raw = (1.0, tokens, work.context_tokens, work.prefill_context, work.decodes, work.prefill_tokens > 0)
        features = [scale * value for scale, value in zip(SCALES, raw, strict=True)]
        predicted_s = sum(map(mul, self._scaled, features))
        if is_fitted:
            wall_s = min(wall_s, MAX_TIME_RATIO * predicted_s) if predicted_s > 0 else wall_s
            self.error += 0.02 * (abs(predicted_s - wall_s) / wall_s - self.error)
        weight = 1.0 / (wall_s * wall_s)
        for row, sums in enumerate(self._sums):
            x = weight * features[row]
            if x:
                sums[:] = [FORGETTING_FACTOR * before + x * feature for before, feature in zip(sums, features)]  # noqa: B905
            else:  # as in every step without a prompt
                sums[:] = [FORGETTING_FACTOR * before for before in sums]
            self._moments[row] = FORGETTING_FACTOR * self._moments[row] + x * wall_s
        self._solve(sweeps=4)

    def _solve(self, sweeps: int) -> None:
        """Sets each coefficient in turn to its best value >= 0. In one expression: the engine computes 96 a step."""
        scaled = self._scaled
        fixed, token, context, attention, decode, prompt = scaled
        rows = [(row, sums, sums[row]) for row, sums in enumerate(self._sums) if sums[row] > 0]
        moments = self._moments
        for _ in range(sweeps):
            for row, (a, b, c, d, e, f), own in rows:  # the coefficients of other rows are 0
                products = a * fixed + b * token + c * context + d * attention + e * decode + f * prompt
                best = (moments[row] - (products - own * scaled[row])) / (own + RIDGE)
                scaled[row] = best if best > 0.0 else 0.0
                fixed, token, context, attention, decode, prompt = scaled

    def model(self) -> StepModel:
        fixed, token, context, attention, row, prompt = (a * scale for a, scale in zip(self._scaled, SCALES, strict=True))
        return StepModel(
            fixed_s=fixed,
            token_s=token,
            knee_tokens=self.knee,
            context_s=context,
            attention_s=attention,
            error=self.error,
            row_s=row,
            prompt_s=prompt,
        )
