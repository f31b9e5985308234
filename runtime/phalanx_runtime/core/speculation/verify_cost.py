"""Measures the cost of draft tokens in steps without prompt tokens, with the cost model as prior.

    plain   predicted time without draft tokens x recent ratio of measured to predicted time
    token   sum of (measured time - draft - plain) / sum of draft tokens, separately for chains and trees
    draft   per pass (steps with one drafted request), per further row (several), per backfilled token

Sums, not means of quotients: a draft token costs less than the noise between steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.speculation.draft_length import StepCosts

RISE_WEIGHT = 0.1
"""Weight of a time above the mean."""
FALL_WEIGHT = 0.4
"""Weight of a time below the mean; pauses only lengthen times."""
DECAY = 0.98
"""Decay of sums per step of the kind."""
OTHER_KIND_DECAY = 0.995
"""Decay per step of the other kind: unused kinds are tried again."""
PRIOR = 8.0
"""In draft tokens."""
MIN_RATIO, MAX_RATIO = 0.1, 8.0
"""Bounds of a token's cost, relative to the predicted one."""
MAX_STRETCH = 2.0
"""Bound of a time, relative to the expected one: longer steps were paused."""
NUM_FIRST = 3
"""First times, of which the fastest counts."""
DOUBT = 0.9
"""Decay of draft times that prevented a probe."""
ROW_WEIGHT = 0.5
"""Weight of a further row's time, which few steps measure."""
ROW_DECAY = 0.99
"""Decay of a further row's time per pass with one row: a time that prevents drafts must expire."""
MIN_ROW_RATIO = 0.01
"""Ratio to a pass below which a further row's time counts as unknown."""
NEGLIGIBLE_BACKFILL = 8
"""Backfilled tokens without measurable cost."""
MIN_TOKEN_SHARE = 0.005
"""Minimum cost of a token, relative to the plain step."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Magnitude of decodes, and whether draft tokens branch."""

    size: int
    has_trees: bool


class _TrackedTime:
    """A moving mean, from the second time on: the first may include loading."""

    __slots__ = ("_first", "_rise_weight", "seconds")

    def __init__(self, rise_weight: float = RISE_WEIGHT) -> None:
        self._rise_weight = rise_weight
        self.seconds = 0.0
        """0: unknown."""
        self._first: list[float] = []

    @property
    def is_known(self) -> bool:
        """Whether it was measured."""
        return len(self._first) > 1

    def add(self, seconds: float) -> None:
        """Adds one measurement."""
        if len(self._first) < NUM_FIRST:
            self._first.append(seconds)
            if len(self._first) > 1:
                self.seconds = min(self._first)
            return
        before = self.seconds or seconds
        weight = self._rise_weight if seconds > before else FALL_WEIGHT
        self.seconds = before + weight * (min(seconds, MAX_STRETCH * before) - before)


class VerifyCost:
    """Cost of draft tokens of one engine. Times are 0 while unknown."""

    def __init__(self) -> None:
        self.verify_s = 0.0
        """Time that verification added to steps since the start."""
        self._plain_ratio: dict[int, float] = {}
        """Measured / predicted time, by magnitude of decodes."""
        self._added: dict[_Kind, tuple[float, float]] = {}
        """Added time and draft tokens."""
        self._pass = _TrackedTime()
        self._row = _TrackedTime(ROW_WEIGHT)
        self._backfill_token = _TrackedTime()

    @property
    def pass_s(self) -> float:
        """Time of a draft pass with one row."""
        return self._pass.seconds

    @property
    def draft_row_s(self) -> float:
        """Time of each further row of a draft pass."""
        return self._row.seconds

    @property
    def backfill_token_s(self) -> float:
        """Time of a backfilled token."""
        return self._backfill_token.seconds

    @property
    def has_pass_time(self) -> bool:
        """Whether draft passes were measured."""
        return self._pass.is_known

    def costs(self, model: StepModel, plain: StepWork, has_trees: bool = False) -> StepCosts:
        """Returns the costs of draft tokens in a step."""
        plain_s, kind = self._plain_s(model, plain), _Kind(plain.decodes.bit_length(), has_trees)
        extra_s: Callable[[int], float] = partial(self._predicted_s, model, plain, plain_s)
        if kind in self._added:
            extra_s = partial(_linear_s, self._token_s(model, plain, plain_s, kind))
        return StepCosts(
            plain_s=plain_s,
            extra_s=extra_s,
            pass_s=self.pass_s,
            backfill_token_s=self.backfill_token_s,
            draft_row_s=self.draft_row_s,
        )

    def learn(
        self,
        model: StepModel,
        plain: StepWork,
        num_draft_tokens: int,
        passes: int,
        wall_s: float,
        draft_s: float,
        has_trees: bool = False,
        backfilled: int = 0,
        further_rows: int = 0,
    ) -> None:
        """Records a step. `plain`: its work without draft tokens. `further_rows`: of all passes."""
        if plain.prefill_tokens or not plain.decodes:
            return
        self._learn_draft(passes, backfilled, draft_s, further_rows)
        size = plain.decodes.bit_length()
        if not num_draft_tokens:
            predicted_s = model.predict(plain)
            if predicted_s > 0:
                ratio = min(max((wall_s - draft_s) / predicted_s, 0.5), 2.0)
                before = self._plain_ratio.get(size, ratio)
                self._plain_ratio[size] = before + RISE_WEIGHT * (ratio - before)
            return
        plain_s = self._plain_s(model, plain)
        expected_s = plain_s + self._predicted_s(model, plain, plain_s, num_draft_tokens)
        added_s = min(wall_s - draft_s, MAX_STRETCH * expected_s) - plain_s
        self.verify_s += max(0.0, added_s)
        kind, other = _Kind(size, has_trees), _Kind(size, not has_trees)
        seconds, count = self._added.get(kind, (0.0, 0.0))
        self._added[kind] = DECAY * seconds + added_s, DECAY * count + num_draft_tokens
        if other in self._added:
            seconds, count = self._added[other]
            self._added[other] = OTHER_KIND_DECAY * seconds, OTHER_KIND_DECAY * count

    def doubt_drafts(self) -> None:
        """Reduces draft times that prevented a probe."""
        self._pass.seconds *= DOUBT
        self._backfill_token.seconds *= DOUBT

    def draft_s(self, passes: int, backfilled: int, further_rows: int = 0) -> float:
        """Returns the expected time of drafts."""
        return passes * self.pass_s + backfilled * self.backfill_token_s + further_rows * self.draft_row_s

    def _learn_draft(self, passes: int, backfilled: int, draft_s: float, further_rows: int) -> None:
        if backfilled > NEGLIGIBLE_BACKFILL:
            self._learn_backfill(passes, backfilled, draft_s, further_rows)
        elif passes and further_rows and self._pass.is_known:
            self._row.add(max(0.0, draft_s - passes * self.pass_s) / further_rows)
        elif passes:
            self._pass.add(draft_s / passes)
            row_s = self._row.seconds * ROW_DECAY
            self._row.seconds = row_s if row_s > MIN_ROW_RATIO * self.pass_s else 0.0

    def _learn_backfill(self, passes: int, backfilled: int, draft_s: float, further_rows: int) -> None:
        """Splits the time between passes and backfill as expected."""
        if passes and draft_s < passes * self.pass_s:
            self._pass.add(draft_s / passes)
        if not self.backfill_token_s or (passes and not self.pass_s):
            self._backfill_token.add(max(0.0, draft_s - self.draft_s(passes, 0, further_rows)) / backfilled)
            return
        ratio = draft_s / self.draft_s(passes, backfilled, further_rows)
        self._backfill_token.add(ratio * self.backfill_token_s)
        if passes:
            self._pass.add(ratio * self.pass_s)

    def _token_s(self, model: StepModel, plain: StepWork, plain_s: float, kind: _Kind) -> float:
        predicted_s = self._predicted_s(model, plain, plain_s, 1)
        seconds, count = self._added[kind]
        measured_s = (seconds + PRIOR * predicted_s) / (count + PRIOR)
        return min(max(measured_s, MIN_RATIO * predicted_s), MAX_RATIO * predicted_s)

    def _plain_s(self, model: StepModel, plain: StepWork) -> float:
        return max(model.predict(plain) * self._plain_ratio.get(plain.decodes.bit_length(), 1.0), 1e-6)

    def _predicted_s(self, model: StepModel, plain: StepWork, plain_s: float, count: int) -> float:
        """Returns the predicted time of `count` draft tokens with mean context."""
        mean = plain.context_tokens / plain.decodes if plain.decodes else 0.0
        work = StepWork(plain.prefill_tokens, plain.decodes + count, plain.context_tokens, plain.prefill_context + count * mean)
        return max(model.predict(work) - model.predict(plain), MIN_TOKEN_SHARE * plain_s * count)


def _linear_s(token_s: float, count: int) -> float:
    return count * token_s
