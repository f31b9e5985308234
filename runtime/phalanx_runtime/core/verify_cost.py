"""What proposals cost a step: the fitted step-time function for a start, and what was measured in steps with them.

    plain     predicted time without proposals, times how far off that is lately in steps without any
    a token   (measured time - draft - plain) / proposals, followed for steps of about as many decodes; at first the function's

Only steps without prompt tokens teach: there a difference is the proposals'.
"""

from phalanx_api.cost import StepModel, StepWork
from phalanx_runtime.core.depths import StepCosts

FOLLOW = 0.1
"""Weight of the latest step."""
ENOUGH = 3
"""Measured steps before their cost is believed."""
FEWEST, MOST = 0.1, 8.0
"""A measured cost of a token counts within these multiples of the predicted one: pauses of the machine are nobody's cost."""
LEAST_SHARE = 0.005
"""Of the plain step: what a token costs at least. The fit may not know the cost of tokens yet."""


class VerifyCost:
    """Learns from steps. Steps are told apart by the magnitude of their decodes."""

    def __init__(self) -> None:
        self.verify_s = 0.0
        """By how much steps with proposals took longer than without, since the start, drafts not counted."""
        self._off: dict[int, float] = {}
        self._token_s: dict[int, tuple[int, float]] = {}
        self._pass_s = 0.0

    def costs(self, model: StepModel, plain: StepWork) -> StepCosts:
        """What a step of this work costs with proposals."""
        plain_s = self._plain_s(model, plain)
        seen, token_s = self._token_s.get(plain.decodes.bit_length(), (0, 0.0))
        if seen >= ENOUGH:
            return StepCosts(plain_s, lambda count: count * token_s, self._pass_s)
        return StepCosts(plain_s, lambda count: self._predicted_s(model, plain, plain_s, count), self._pass_s)

    def learn(self, model: StepModel, plain: StepWork, proposals: int, depth: int, wall_s: float, draft_s: float) -> None:
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
            pass_s = draft_s / depth
            self._pass_s = pass_s if not self._pass_s else self._pass_s + FOLLOW * (pass_s - self._pass_s)
        plain_s = self._plain_s(model, plain)
        over_s = wall_s - draft_s - plain_s
        self.verify_s += max(0.0, over_s)
        expected_s = self._predicted_s(model, plain, plain_s, proposals) / proposals
        token_s = min(max(over_s / proposals, FEWEST * expected_s), MOST * expected_s)
        seen, before_s = self._token_s.get(size, (0, 0.0))
        weight = max(FOLLOW, 1 / (seen + 1))
        self._token_s[size] = (seen + 1, before_s + weight * (token_s - before_s))

    def _plain_s(self, model: StepModel, plain: StepWork) -> float:
        return max(model.predict(plain) * self._off.get(plain.decodes.bit_length(), 1.0), 1e-6)

    def _predicted_s(self, model: StepModel, plain: StepWork, plain_s: float, count: int) -> float:
        """What the function says that so many proposals add, of the mean context of the decodes."""
        mean = plain.context_tokens / plain.decodes if plain.decodes else 0.0
        work = StepWork(plain.prefill_tokens, plain.decodes + count, plain.context_tokens, plain.prefill_context + count * mean)
        return max(model.predict(work) - model.predict(plain), LEAST_SHARE * plain_s * count)
