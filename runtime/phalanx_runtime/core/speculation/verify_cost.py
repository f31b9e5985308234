"""What proposals cost a step: the fitted step-time function for a start, and what was measured in steps with them.

    plain     predicted time without proposals, times how far off that is lately in steps without any
    a token   sum of (measured time - draft - plain) / sum of proposals, over steps of about as many decodes, the latest count
              more; begun with the function's

Trees are attended to in another way than chains, so steps with and without them are told apart. What is not used any more is
forgotten: then it is tried again.

A draft takes so much for each pass, for each request in a pass beyond one, and for each token that it catches up with: steps
with one request that is drafted for teach the first, with several the second, and those that catch up the third. Probes are of
one request: without the second they would promise that all requests cost as little. Only steps without prompt tokens teach:
there a difference is the proposals'. Sums, and not the mean of quotients: one proposal in a step of many decodes is far less
than what two such steps differ by.
"""

from dataclasses import dataclass
from functools import partial

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.speculation.draft_length import StepCosts

FOLLOW = 0.1
"""Weight of the latest step."""
FOLLOW_DOWN = 0.4
"""The same of a time that is shorter than believed: what makes times longer is often a pause, what makes them shorter is none."""
FADE = 0.98
"""How much a step with proposals counts relative to the next one."""
FORGET = 0.995
"""How much of what was measured of the other kind is left after a step with proposals."""
PRIOR = 8.0
"""So many proposals the predicted cost weighs."""
FEWEST, MOST = 0.1, 8.0
"""A measured cost of a token counts within these multiples of the predicted one."""
LONGEST = 2.0
"""A step that takes longer than so many times what it was to take counts as this: pauses of the machine are nobody's cost."""
FIRST_TIMES = 3
"""So many measured times of a draft count by the fastest of them."""
DOUBT = 0.9
"""How much of what a draft took is still believed, after it kept a probe from being made."""
FOLLOW_ROW = 0.5
"""Weight of the latest measured time of a further row: few steps teach it, and each that is tried in vain costs."""
FADE_ROW = 0.99
"""How much of what a further row took is still believed after a pass with one: what keeps it from being tried is forgotten."""
LEAST_ROW = 0.01
"""Of a pass: what a further row takes at least, if anything is believed of it."""
FEW_BEHIND = 8
"""Tokens that a draft catches up with in one pass as if there were none."""
LEAST_SHARE = 0.005
"""Of the plain step: what a token costs at least. The fit may not know the cost of tokens yet."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What steps are told apart by: the magnitude of their decodes, and whether proposals branch."""

    size: int
    has_trees: bool


class _TrackedTime:
    """A time that is followed. Of the first ones the fastest is believed, and none alone: the first of all may have loaded what
    later ones find."""

    __slots__ = ("_first", "_follow", "seconds")

    def __init__(self, follow: float = FOLLOW) -> None:
        self._follow = follow
        self.seconds = 0.0
        """0 while nothing is believed of it."""
        self._first: list[float] = []

    @property
    def is_known(self) -> bool:
        """Whether something is."""
        return len(self._first) > 1

    def add(self, seconds: float) -> None:
        """One measurement."""
        if len(self._first) < FIRST_TIMES:
            self._first.append(seconds)
            if len(self._first) > 1:
                self.seconds = min(self._first)
            return
        before = self.seconds or seconds
        follow = self._follow if seconds > before else FOLLOW_DOWN
        self.seconds = before + follow * (min(seconds, LONGEST * before) - before)


class VerifyCost:
    """Learns from steps."""

    def __init__(self) -> None:
        self.verify_s = 0.0
        """By how much steps with proposals took longer than without, since the start, drafts not counted."""
        self._off: dict[int, float] = {}
        self._over: dict[_Kind, tuple[float, float]] = {}
        """Seconds beyond plain steps, and proposals that were in them."""
        self._pass = _TrackedTime()
        self._row = _TrackedTime(FOLLOW_ROW)
        self._behind = _TrackedTime()

    @property
    def pass_s(self) -> float:
        """Of a draft; 0 while nothing is believed of it."""
        return self._pass.seconds

    @property
    def draft_row_s(self) -> float:
        """Of each row of a draft's pass beyond the first; 0 while nothing is believed of it."""
        return self._row.seconds

    @property
    def behind_s(self) -> float:
        """Of a token that a draft catches up with, beyond its pass; 0 while nothing is believed of it."""
        return self._behind.seconds

    @property
    def knows_passes(self) -> bool:
        """Whether something is believed of a draft's passes."""
        return self._pass.is_known

    def costs(self, model: StepModel, plain: StepWork, has_trees: bool = False) -> StepCosts:
        """What a step of this work costs with proposals."""
        plain_s, kind = self._plain_s(model, plain), _Kind(plain.decodes.bit_length(), has_trees)
        if kind not in self._over:
            expected = partial(self._predicted_s, model, plain, plain_s)
            return StepCosts(
                plain_s=plain_s, extra_s=expected, pass_s=self.pass_s, behind_s=self.behind_s, draft_row_s=self.draft_row_s
            )
        token_s = self._token_s(model, plain, plain_s, kind)
        return StepCosts(
            plain_s=plain_s,
            extra_s=lambda count: count * token_s,
            pass_s=self.pass_s,
            behind_s=self.behind_s,
            draft_row_s=self.draft_row_s,
        )

    def learn(
        self,
        model: StepModel,
        plain: StepWork,
        proposals: int,
        depth: int,
        wall_s: float,
        draft_s: float,
        has_trees: bool = False,
        behind: int = 0,
        rows: int = 0,
    ) -> None:
        """A step that was measured: its work without proposals, how many it had, the deepest of those that were drafted, how many
        tokens drafts caught up with, and how many rows its passes had beyond one each."""
        if plain.prefill_tokens or not plain.decodes:
            return
        size = plain.decodes.bit_length()
        if behind > FEW_BEHIND:
            self._learn_behind(depth, behind, draft_s, rows)
        elif depth and rows and self._pass.is_known:
            self._row.add(max(0.0, draft_s - depth * self.pass_s) / rows)
        elif depth:
            self._pass.add(draft_s / depth)
            self._fade_row()
        if not proposals:
            predicted_s = model.predict(plain)
            if predicted_s > 0:
                off = min(max((wall_s - draft_s) / predicted_s, 0.5), 2.0)
                self._off[size] = off if size not in self._off else self._off[size] + FOLLOW * (off - self._off[size])
            return
        plain_s = self._plain_s(model, plain)
        expected_s = plain_s + self._predicted_s(model, plain, plain_s, proposals)
        over_s = min(wall_s - draft_s, LONGEST * expected_s) - plain_s
        self.verify_s += max(0.0, over_s)
        kind, other = _Kind(size, has_trees), _Kind(size, not has_trees)
        seconds, count = self._over.get(kind, (0.0, 0.0))
        self._over[kind] = FADE * seconds + over_s, FADE * count + proposals
        if other in self._over:
            seconds, count = self._over[other]
            self._over[other] = FORGET * seconds, FORGET * count

    def doubt_drafts(self) -> None:
        """A draft took too long for a probe: only a new one tells whether it still does."""
        self._pass.seconds *= DOUBT
        self._behind.seconds *= DOUBT

    def draft_s(self, passes: int, behind: int, rows: int = 0) -> float:
        """How long drafts with so many passes take that catch up with so many tokens, with so many rows beyond one in each."""
        return passes * self.pass_s + behind * self.behind_s + rows * self.draft_row_s

    def _fade_row(self) -> None:
        """What is nearly forgotten is forgotten: then the next measurement is believed whole."""
        left_s = self._row.seconds * FADE_ROW
        self._row.seconds = left_s if left_s > LEAST_ROW * self.pass_s else 0.0

    def _learn_behind(self, depth: int, behind: int, draft_s: float, rows: int) -> None:
        """Passes and tokens were measured together: both are off alike; passes alone take no longer."""
        if depth and draft_s < depth * self.pass_s:
            self._pass.add(draft_s / depth)
        if not self.behind_s or (depth and not self.pass_s):
            self._behind.add(max(0.0, draft_s - self.draft_s(depth, 0, rows)) / behind)
            return
        off = draft_s / self.draft_s(depth, behind, rows)
        self._behind.add(off * self.behind_s)
        if depth:
            self._pass.add(off * self.pass_s)

    def _token_s(self, model: StepModel, plain: StepWork, plain_s: float, kind: "_Kind") -> float:
        """What a proposal costs in steps like this one."""
        expected_s = self._predicted_s(model, plain, plain_s, 1)
        seconds, count = self._over[kind]
        measured_s = (seconds + PRIOR * expected_s) / (count + PRIOR)
        return min(max(measured_s, FEWEST * expected_s), MOST * expected_s)

    def _plain_s(self, model: StepModel, plain: StepWork) -> float:
        return max(model.predict(plain) * self._off.get(plain.decodes.bit_length(), 1.0), 1e-6)

    def _predicted_s(self, model: StepModel, plain: StepWork, plain_s: float, count: int) -> float:
        """What the function says that so many proposals add, of the mean context of the decodes."""
        mean = plain.context_tokens / plain.decodes if plain.decodes else 0.0
        work = StepWork(plain.prefill_tokens, plain.decodes + count, plain.context_tokens, plain.prefill_context + count * mean)
        return max(model.predict(work) - model.predict(plain), LEAST_SHARE * plain_s * count)
