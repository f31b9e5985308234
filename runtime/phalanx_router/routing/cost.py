"""Predicted cost of a request in a group, in seconds.

    J = urgency * (haste * T                          T: time to first token, backlog plus the uncached prompt
                   + (1 - haste) * extra)             extra: prompt time above that of the best group
      + 0.05 * E_out * I+                             decoding; I+: inter-token latency with the request
      + 0.02 * B * (stall + E_out * (I+ - I))         cost to the B running requests
      + 3 s * max(0, (k+ - 0.5) / 0.5)^2              pages; k+: pressure with the request

E_out: mean output tokens, at most the request's own maximum. Without a target a first token is late after three times the
uncached prompt time in the best group, at least 2 s. Haste is 2 s over that time: a long prompt prefers groups with few running
requests. A prompt stalls each running request for half of its time; a stall over 1 s weighs up to ten times as much. A degraded
group costs 20 % more. See docs/balancing.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx_router.routing.view import GroupView

DECODE_WEIGHT, OTHERS_WEIGHT = 0.05, 0.02
PAGES_S, FREE_PRESSURE = 3.0, 0.5
DEGRADED_FACTOR = 1.2
USUAL_TTFT_TARGET_S = 2.0
MAX_URGENCY, MIN_URGENCY = 4.0, 0.25
LATE_FACTOR = 3.0
PAUSE_S, MAX_PAUSE_FACTOR = 1.0, 10.0
DEFAULT_OUTPUT_TOKENS = 128.0
"""Before any group reports a mean."""


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """A request to be assigned to a group."""

    prompt_tokens: int  # prompt and delivered output
    output_tokens: int  # maximum
    ttft_target_s: float | None = None

    @property
    def urgency(self) -> float:
        """Weight of the time to first token."""
        if not self.ttft_target_s:
            return 1.0
        return min(MAX_URGENCY, max(MIN_URGENCY, USUAL_TTFT_TARGET_S / self.ttft_target_s))


@dataclass(frozen=True, slots=True)
class TtftWeight:
    """Weights of a request's time to first token."""

    urgency: float = 1.0
    haste: float = 1.0  # less for a long prompt
    best_prompt_s: float = 0.0  # least prompt time in any candidate group


UNIT_WEIGHT = TtftWeight()


def ttft_weight(demand: RequestDemand, views: Sequence[GroupView], hits: Mapping[str, int]) -> TtftWeight:
    """Weights of a request. `hits`: cached prompt tokens, by group key."""
    tokens = demand.prompt_tokens
    if demand.ttft_target_s or not views:
        return TtftWeight(demand.urgency)
    best_prompt_s = min(view.prompt_s(tokens, hits.get(view.key, 0)) for view in views)
    late_s = LATE_FACTOR * best_prompt_s
    if late_s <= USUAL_TTFT_TARGET_S:
        return UNIT_WEIGHT
    return TtftWeight(1.0, USUAL_TTFT_TARGET_S / late_s, best_prompt_s)


def stall_cost_s(prompt_s: float) -> float:
    """Cost of a prompt to each running request."""
    return prompt_s / 2 * min(MAX_PAUSE_FACTOR, max(1.0, prompt_s / PAUSE_S))


class CostTerms(NamedTuple):
    """Terms of J, and the factor that multiplies them."""

    first_token_s: float
    decode_s: float
    others_s: float
    pages_s: float
    factor: float = 1.0

    @property
    def total_s(self) -> float:
        """Returns the predicted cost J, in seconds."""
        return (self.first_token_s + self.decode_s + self.others_s + self.pages_s) * self.factor


def cost_terms(view: GroupView, demand: RequestDemand, hit_tokens: int, weight: TtftWeight = UNIT_WEIGHT) -> CostTerms:
    """Cost of the request in a group. `hit_tokens`: cached prompt tokens."""
    missing = max(1, demand.prompt_tokens - hit_tokens)
    prompt_s = view.prompt_s(demand.prompt_tokens, hit_tokens)
    output = min(demand.output_tokens, view.mean_output_tokens or DEFAULT_OUTPUT_TOKENS)
    itl_s = view.itl_with_s(demand.prompt_tokens)
    excess = view.pressure + view.kept_tokens(missing) / view.total_tokens - FREE_PRESSURE
    extra_s = max(0.0, prompt_s - weight.best_prompt_s)
    return CostTerms(
        weight.urgency * (weight.haste * (view.backlog_s + prompt_s) + (1 - weight.haste) * extra_s),
        DECODE_WEIGHT * output * itl_s,
        OTHERS_WEIGHT * view.load.running * (stall_cost_s(prompt_s) + output * (itl_s - view.itl_s)),
        PAGES_S * (excess / (1 - FREE_PRESSURE)) ** 2 if excess > 0 and view.has_report else 0.0,
        DEGRADED_FACTOR if view.state == "degraded" else 1.0,
    )
