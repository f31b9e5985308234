"""Predicted cost of sending a request to a group, in seconds; dispatch and requeueing minimise it.

    J = urgency * (haste * T                          T: time to first token, backlog plus the uncached prompt
                   + (1 - haste) * more)              more: prompt time above that of the best group
      + 0.05 * E_out * I+                             decoding; I+: step time with the request
      + 0.02 * B * (stall + E_out * (I+ - I))         cost to the B running requests
      + 3 s * max(0, (k+ - 0.5) / 0.5)^2              pages; k+: share used, reserved or needed, the request included

E_out: mean output tokens of recent requests of the model, at most the request's own maximum. Forecasting pages further ahead made
choices worse, and a larger weight of others concentrated prompts on few groups (balancing.md 3.7). A shorter time-to-first-token
target raises the urgency.

Without a target, a request is late after three times its uncached prompt time in the best group, or 2 s if that is more. Haste
is 2 s over that time, so a long prompt tolerates a longer wait and prefers groups with few running requests. Prompt time above
that of the best group is work, not waiting, and counts in full. A prompt stalls each running request for half of its time; a
stall over 1 s, which only a long answer amortises, weighs up to ten times as much. A degraded group costs 20 % more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx_router.routing.view import GroupView

DECODE_WEIGHT, OTHERS_WEIGHT = 0.05, 0.02
PAGES_S, PAGES_FROM = 3.0, 0.5
DEGRADED_FACTOR = 1.2
USUAL_TTFT_TARGET_S = 2.0
MAX_URGENCY, MIN_URGENCY = 4.0, 0.25
LATE_FACTOR = 3.0
"""A first token is late after this multiple of the prompt time, if that exceeds `USUAL_TTFT_TARGET_S`."""
PAUSE_S, MAX_PAUSE_FACTOR = 1.0, 10.0
DEFAULT_OUTPUT_TOKENS = 128.0
"""Expected output tokens of a request before any group reported a mean."""


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """A request to be assigned to a group."""

    # Tokens to be stored in pages: prompt and delivered output.
    prompt_tokens: int
    # Maximum.
    output_tokens: int
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
    # 1, less for a long prompt.
    haste: float = 1.0
    # Least prompt time in any candidate group.
    least_own_s: float = 0.0


UNIT_WEIGHT = TtftWeight()


def ttft_weight(demand: RequestDemand, views: Sequence[GroupView], hits: Mapping[str, int]) -> TtftWeight:
    """Returns the weights of a request with candidate groups `views`. `hits`: prompt tokens that each group holds, by key."""
    tokens = demand.prompt_tokens
    if demand.ttft_target_s or not views:
        return TtftWeight(demand.urgency)
    least_own_s = min(view.prompt_s(tokens, hits.get(view.key, 0)) for view in views)
    late_s = LATE_FACTOR * least_own_s
    if late_s <= USUAL_TTFT_TARGET_S:
        return UNIT_WEIGHT
    return TtftWeight(1.0, USUAL_TTFT_TARGET_S / late_s, least_own_s)


def stall_s(own_s: float) -> float:
    """Returns the cost to each running request of a prompt of `own_s`: half of it, more above `PAUSE_S`."""
    return own_s / 2 * min(MAX_PAUSE_FACTOR, max(1.0, own_s / PAUSE_S))


class CostTerms(NamedTuple):
    """Terms of J in its order, and the factor that multiplies them."""

    first_token_s: float
    decode_s: float
    others_s: float
    pages_s: float
    factor: float = 1.0

    @property
    def total_s(self) -> float:
        """J."""
        return (self.first_token_s + self.decode_s + self.others_s + self.pages_s) * self.factor


def cost_terms(view: GroupView, demand: RequestDemand, hit_tokens: int, wait: TtftWeight = UNIT_WEIGHT) -> CostTerms:
    """Returns the cost of the request in the group, where pages hold `hit_tokens` of its prompt."""
    missing = max(1, demand.prompt_tokens - hit_tokens)
    own_s = view.prompt_s(demand.prompt_tokens, hit_tokens)
    output = min(demand.output_tokens, view.mean_output_tokens or DEFAULT_OUTPUT_TOKENS)
    grown_s = view.grown_itl_s(demand.prompt_tokens)
    over = view.pressure + missing / (view.page_size * view.total_pages) - PAGES_FROM
    more_s = max(0.0, own_s - wait.least_own_s)
    return CostTerms(
        wait.urgency * (wait.haste * (view.backlog_s + own_s) + (1 - wait.haste) * more_s),
        DECODE_WEIGHT * output * grown_s,
        OTHERS_WEIGHT * view.running * (stall_s(own_s) + output * (grown_s - view.itl_s)),
        PAGES_S * (over / (1 - PAGES_FROM)) ** 2 if over > 0 and view.is_known else 0.0,
        DEGRADED_FACTOR if view.state == "degraded" else 1.0,
    )
