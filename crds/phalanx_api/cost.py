"""Step-time function for the engine's token budget, the routers, the operator and simulators, and its online fit.

    t = fixed + token * max(knee, p + B) + row * B + context * C + attention * sum(p_i * c_i) + prompt * [p > 0]

A step computes p prompt tokens and B decodes, with one sampled token per decode; C is the sum of context lengths; a prompt chunk
of p_i tokens has mean context c_i. Below the knee a step costs as much as reading the weights. A step with prompt tokens takes
another path of the engine, with a constant cost. All times are seconds.

The fit is least squares of relative errors with forgetting. Coefficients are never negative. The knee is one of KNEES: each
candidate has its own sums, and the best predictor is used. Every step is predicted before it is learnt, so `error` is out of
sample.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

KNEES = (0, 8, 32, 128)
"""Candidates for the number of tokens up to which a step takes the same time."""
MIN_SAMPLES = 16
"""Steps before the fit is used."""
FORGET = 0.995
"""Weight of a step relative to the next: about the last 200 steps count."""
CLIP = 3.0
"""Upper bound of measured over predicted time: a pause of the machine is not the model's."""
SCALES = (1.0, 1e-2, 1e-4, 1e-6, 1e-2, 1.0)
"""Scales the features to about 1, so the ridge weighs on all equally."""
NUM = len(SCALES)
RIDGE = 1e-9
SHORTEST_S = 1e-6
HUNG_FLOOR_S, HUNG_FACTOR = 10.0, 5.0
COEFFICIENTS = ("fixed_s", "token_s", "knee_tokens", "context_s", "attention_s", "error", "row_s", "prompt_s")
"""Fields of `StepModel` in the order in which they are sent."""
REQUIRED_COEFFICIENTS = 5


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step. `prefill_context`: sum over prompt chunks of tokens times mean context."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    prefill_context: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The step-time function with its coefficients. `error`: mean relative error on steps before they were learnt."""

    fixed_s: float
    token_s: float
    knee_tokens: int
    context_s: float
    attention_s: float
    error: float = 0.0
    row_s: float = 0.0
    prompt_s: float = 0.0

    @staticmethod
    def told(numbers: Sequence[float]) -> "StepModel | None":
        """Returns the function with these coefficients in order, if they are valid.

        Missing trailing coefficients cost nothing; further ones are ignored.
        """
        if (
            len(numbers) < REQUIRED_COEFFICIENTS
            or not all(map(math.isfinite, numbers))
            or min(numbers) < 0
            or numbers[0] + numbers[1] <= 0
        ):
            return None
        fields = dict(zip(COEFFICIENTS, numbers, strict=False))
        return StepModel(knee_tokens=int(fields.pop("knee_tokens")), **fields)

    def predict(self, work: StepWork) -> float:
        """Returns the seconds of this step."""
        tokens = max(self.knee_tokens, work.prefill_tokens + work.decodes)
        linear = self.fixed_s + self.token_s * tokens + self.context_s * work.context_tokens
        linear += self.attention_s * work.prefill_context + self.row_s * work.decodes
        return linear + self.prompt_s if work.prefill_tokens else linear

    def prefill_within(self, limit_s: float, decodes: int, context_tokens: int) -> int:
        """Returns how many prompt tokens fit with these decodes into a step of `limit_s`; 0 when the decodes alone take longer.

        Their context is assumed to be the decodes' mean. A model without cost per token gives 10^9.
        """
        mean_context = context_tokens / decodes if decodes else 0.0
        each_s = self.token_s + self.attention_s * mean_context
        room_s = limit_s - self.prompt_s - self.predict(StepWork(0, decodes, context_tokens))
        if room_s < 0:
            return 0
        free = max(self.knee_tokens - decodes, 0)
        if each_s <= 0:
            return 10**9
        attended_s = free * self.attention_s * mean_context
        if room_s < attended_s:
            return int(room_s / (self.attention_s * mean_context))
        return free + int((room_s - attended_s) / each_s)


def attended(tokens: int, held: int = 0) -> float:
    """Returns the attention work of the tokens of a sequence after the first `held`: the sum of their contexts."""
    return (tokens * tokens - held * held) / 2


def hung_after_s(predicted_s: float | None) -> float:
    """Returns the seconds after which a step counts as hung: max(10 s, 5 times the prediction)."""
    return max(HUNG_FLOOR_S, HUNG_FACTOR * predicted_s) if predicted_s is not None else HUNG_FLOOR_S


def describe(decodes: Iterable[int], chunks: Iterable[tuple[int, int]], proposals: Iterable[tuple[int, int]] = ()) -> StepWork:
    """Returns the work of a step from the context of each decode, (start, count) of each prompt chunk, and (context, count) of
    decodes with draft tokens, which share a context."""
    num_decodes = context = prefill = 0
    attended = 0.0
    for length in decodes:
        num_decodes += 1
        context += length
    for start, count in chunks:
        prefill += count
        context += start + count
        attended += count * (start + count / 2)
    for length, count in proposals:
        num_decodes += count
        attended += count * length
    return StepWork(prefill, num_decodes, context, attended)


class StepFit:
    """Learns a `StepModel` from measured steps, at a few hundred multiplications per step."""

    __slots__ = ("_candidates", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._candidates = [_Candidate(knee) for knee in KNEES]

    def add(self, work: StepWork, wall_s: float) -> None:
        """Learns one step. Times below a microsecond are ignored: the clock did not advance."""
        if wall_s < SHORTEST_S:
            return
        believed = self.num_steps >= MIN_SAMPLES
        self.num_steps += 1
        for candidate in self._candidates:
            candidate.learn(work, wall_s, believed)

    def model(self) -> StepModel | None:
        """Returns the fitted function, after `MIN_SAMPLES` steps."""
        if self.num_steps < MIN_SAMPLES:
            return None
        return min(self._candidates, key=lambda candidate: candidate.error).model()


class _Candidate:
    """Sums for one knee, and the scaled coefficients by projected Gauss-Seidel, started from the step before."""

    __slots__ = ("_moments", "_scaled", "_sums", "error", "knee")

    def __init__(self, knee: int) -> None:
        self.knee = knee
        self.error = 0.0
        self._sums = [[0.0] * NUM for _ in range(NUM)]
        self._moments = [0.0] * NUM
        self._scaled = [0.0] * NUM

    def learn(self, work: StepWork, wall_s: float, believed: bool) -> None:
        tokens = max(self.knee, work.prefill_tokens + work.decodes)
        raw = (1.0, tokens, work.context_tokens, work.prefill_context, work.decodes, work.prefill_tokens > 0)
        features = [scale * value for scale, value in zip(SCALES, raw, strict=True)]
        predicted_s = sum(map(mul, self._scaled, features))
        if believed:
            wall_s = min(wall_s, CLIP * predicted_s) if predicted_s > 0 else wall_s
            self.error += 0.02 * (abs(predicted_s - wall_s) / wall_s - self.error)
        weight = 1.0 / (wall_s * wall_s)
        for row, sums in enumerate(self._sums):
            x = weight * features[row]
            sums[:] = [FORGET * before + x * feature for before, feature in zip(sums, features, strict=True)]
            self._moments[row] = FORGET * self._moments[row] + x * wall_s
        self._solve(sweeps=4)

    def _solve(self, sweeps: int) -> None:
        """Sets each coefficient in turn to its best non-negative value."""
        for _ in range(sweeps):
            for row, sums in enumerate(self._sums):
                own = sums[row]
                others = sum(map(mul, sums, self._scaled)) - own * self._scaled[row]
                self._scaled[row] = max(0.0, (self._moments[row] - others) / (own + RIDGE)) if own > 0 else 0.0

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
