"""What proposals cost a step: the fitted step-time function for a start, and what was measured in steps with them.

    plain     predicted time without proposals, times how far off that is lately in steps without any
    a token   sum of (measured time - draft - plain) / sum of proposals, over steps of about as many decodes, the latest count
              more; begun with the function's

Trees are attended to in another way than chains, so steps with and without them are told apart. What is not used any more is
forgotten: then it is tried again.

Only steps without prompt tokens teach: there a difference is the proposals'. Sums, and not the mean of quotients: one proposal
in a step of many decodes is far less than what two such steps differ by.
"""

from dataclasses import dataclass

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.depths import StepCosts

FOLLOW = 0.1
"""Weight of the latest step."""
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
FIRST_PASSES = 3
"""So many measured passes of a draft count by the fastest of them."""
DOUBT = 0.9
"""How much of what a pass of a draft took is still believed, after it kept a probe from being made."""
LEAST_SHARE = 0.005
"""Of the plain step: what a token costs at least. The fit may not know the cost of tokens yet."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What steps are told apart by: the magnitude of their decodes, and whether proposals branch."""

    size: int
    has_trees: bool


class VerifyCost:
    """Learns from steps."""

    def __init__(self) -> None:
        self.verify_s = 0.0
        """By how much steps with proposals took longer than without, since the start, drafts not counted."""
        self._off: dict[int, float] = {}
        self._over: dict[_Kind, tuple[float, float]] = {}
        """Seconds beyond plain steps, and proposals that were in them."""
        self.pass_s = 0.0
        """Of a draft; 0 while nothing is believed of it."""
        self._first: list[float] = []

    def costs(self, model: StepModel, plain: StepWork, has_trees: bool = False) -> StepCosts:
        """What a step of this work costs with proposals."""
        plain_s, kind = self._plain_s(model, plain), _Kind(plain.decodes.bit_length(), has_trees)
        if kind not in self._over:
            return StepCosts(plain_s, lambda count: self._predicted_s(model, plain, plain_s, count), self.pass_s)
        token_s = self._token_s(model, plain, plain_s, kind)
        return StepCosts(plain_s, lambda count: count * token_s, self.pass_s)

    def learn(
        self,
        model: StepModel,
        plain: StepWork,
        proposals: int,
        depth: int,
        wall_s: float,
        draft_s: float,
        has_trees: bool = False,
    ) -> None:
        """A step that was measured: its work without proposals, how many it had, and the deepest of those that were drafted."""
        if plain.prefill_tokens or not plain.decodes:
            return
        size = plain.decodes.bit_length()
        if not proposals:
            predicted_s = model.predict(plain)
            if predicted_s > 0:
                off = min(max(wall_s / predicted_s, 0.5), 2.0)
                self._off[size] = off if size not in self._off else self._off[size] + FOLLOW * (off - self._off[size])
            return
        if depth:
            self._learn_pass(draft_s / depth)
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

    def doubt_passes(self) -> None:
        """Passes of the draft took too long for a probe: only a new one tells whether they still do."""
        self.pass_s *= DOUBT

    def _learn_pass(self, pass_s: float) -> None:
        """A pass of a draft was measured. Of the first ones the fastest is believed, and none alone: the first of all may have
        loaded what later ones find."""
        if len(self._first) < FIRST_PASSES:
            self._first.append(pass_s)
            if len(self._first) > 1:
                self.pass_s = min(self._first)
            return
        before = self.pass_s or pass_s
        self.pass_s = before + FOLLOW * (min(pass_s, LONGEST * before) - before)

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
