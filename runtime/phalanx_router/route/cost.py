"""What it costs to give a request to a group, in seconds: the function that choosing and requeueing minimise.

    J = urgency * T                                   its time to first token: backlog there, and its prompt that no page holds
      + 0.05 * E_out * I+                             its decoding, I+ the time of a step with it
      + 0.02 * B * (T_own / 2 + E_out * (I+ - I))     what it costs the B requests that run there
      + 3 s * max(0, (k+ - 0.5) / 0.5)^2              pages: k+ the share used, reserved or wanted, its own included

E_out is what requests there had lately, at most what this one may have. Forecasting pages further ahead made choices worse, and a
larger weight of others let prompts gather on few groups (balancing.md 3.7). A request with a target for its first token weighs
that time more the shorter the target. A degraded group counts a fifth more.
"""

from dataclasses import dataclass
from typing import NamedTuple

from phalanx_router.route.view import GroupView

DECODE_WEIGHT, OTHERS_WEIGHT = 0.05, 0.02
PAGES_S, PAGES_FROM = 3.0, 0.5
DEGRADED_FACTOR = 1.2
USUAL_TTFT_TARGET_S = 2.0
MOST_URGENT, LEAST_URGENT = 4.0, 0.25
UNKNOWN_OUTPUT = 128.0
"""Output tokens that a request is thought to have before any group has told."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What is to be placed: tokens to be in pages (prompt and delivered), output tokens at most, a target for the first token."""

    prompt_tokens: int
    output_tokens: int
    ttft_target_s: float | None = None

    @property
    def urgency(self) -> float:
        """How much its time to first token weighs."""
        if not self.ttft_target_s:
            return 1.0
        return min(MOST_URGENT, max(LEAST_URGENT, USUAL_TTFT_TARGET_S / self.ttft_target_s))


class Terms(NamedTuple):
    """The parts of J, in its order; `factor` is what they are multiplied by."""

    first_token_s: float
    decode_s: float
    others_s: float
    pages_s: float
    factor: float = 1.0

    @property
    def total_s(self) -> float:
        """J."""
        return (self.first_token_s + self.decode_s + self.others_s + self.pages_s) * self.factor


def terms(view: GroupView, newcomer: Newcomer, hit_tokens: int, urgency: float = 1.0) -> Terms:
    """What the newcomer costs there if so many of its tokens are in pages already. `urgency`: the newcomer's."""
    missing = max(1, newcomer.prompt_tokens - hit_tokens)
    own_s = view.prompt_s(newcomer.prompt_tokens, hit_tokens)
    output = min(newcomer.output_tokens, view.mean_output_tokens or UNKNOWN_OUTPUT)
    grown_s = view.grown_itl_s(newcomer.prompt_tokens)
    over = view.pressure + missing / (view.page_size * view.total_pages) - PAGES_FROM
    return Terms(
        urgency * (view.backlog_s + own_s),
        DECODE_WEIGHT * output * grown_s,
        OTHERS_WEIGHT * view.running * (own_s / 2 + output * (grown_s - view.itl_s)),
        PAGES_S * (over / (1 - PAGES_FROM)) ** 2 if over > 0 and view.is_known else 0.0,
        DEGRADED_FACTOR if view.state == "degraded" else 1.0,
    )
