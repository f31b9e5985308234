"""What it costs to give a request to a group, in seconds: the function that choosing and requeueing minimise.

    J = urgency * (haste * T                          its time to first token: backlog there, and its prompt that no page holds
                   + (1 - haste) * more)              what of its prompt it has to compute there and not in the best group
      + 0.05 * E_out * I+                             its decoding, I+ the time of a step with it
      + 0.02 * B * (stall + E_out * (I+ - I))         what it costs the B requests that run there
      + 3 s * max(0, (k+ - 0.5) / 0.5)^2              pages: k+ the share used, reserved or wanted, its own included

E_out is what requests there had lately, at most what this one may have. Forecasting pages further ahead made choices worse, and a
larger weight of others let prompts gather on few groups (balancing.md 3.7). A request with a target for its first token weighs
that time more the shorter the target.

One without is late after three times what its prompt takes alone in the best group, where pages hold part of it only the rest, if
that is more than 2 s. So a long prompt bears a wait that a short one does not: its haste is 2 s of that time, and it goes where
few others stand still beside it. What it would have to compute more there than in the best group is work, not waiting, and
weighs wholly. Others lose half its time by it; a pause longer than a second, which later tokens make good only in a long answer,
weighs the more the longer it is, up to ten times. A degraded group counts a fifth more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx_router.routing.view import GroupView

DECODE_WEIGHT, OTHERS_WEIGHT = 0.05, 0.02
PAGES_S, PAGES_FROM = 3.0, 0.5
DEGRADED_FACTOR = 1.2
USUAL_TTFT_TARGET_S = 2.0
MOST_URGENT, LEAST_URGENT = 4.0, 0.25
LATE_TIMES = 3.0
"""A first token is late after so many times what the prompt takes alone, where that is longer than the usual target."""
PAUSE_S, MOST_PAUSES = 1.0, 10.0
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


@dataclass(frozen=True, slots=True)
class Wait:
    """How much a newcomer's time to first token weighs: its urgency times its haste, which is 1, and less for a long prompt.

    least_own_s: of its prompt's own time, the least in any of the groups that it may go to.
    """

    urgency: float = 1.0
    haste: float = 1.0
    least_own_s: float = 0.0


NO_WAIT = Wait()


def wait_of(newcomer: Newcomer, views: Sequence[GroupView], hits: Mapping[str, int]) -> Wait:
    """How a newcomer waits that may go to these groups. `hits`: tokens of its prompt that they hold, by key."""
    tokens = newcomer.prompt_tokens
    if newcomer.ttft_target_s or not views:
        return Wait(newcomer.urgency)
    least_own_s = min(view.prompt_s(tokens, hits.get(view.key, 0)) for view in views)
    late_s = LATE_TIMES * least_own_s
    if late_s <= USUAL_TTFT_TARGET_S:
        return NO_WAIT
    return Wait(1.0, USUAL_TTFT_TARGET_S / late_s, least_own_s)


def stall_s(own_s: float) -> float:
    """What a prompt of so many seconds costs each request beside it: half of them, and more where the pause is a long one."""
    return own_s / 2 * min(MOST_PAUSES, max(1.0, own_s / PAUSE_S))


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


def terms(view: GroupView, newcomer: Newcomer, hit_tokens: int, wait: Wait = NO_WAIT) -> Terms:
    """What the newcomer costs there if so many of its tokens are in pages already."""
    missing = max(1, newcomer.prompt_tokens - hit_tokens)
    own_s = view.prompt_s(newcomer.prompt_tokens, hit_tokens)
    output = min(newcomer.output_tokens, view.mean_output_tokens or UNKNOWN_OUTPUT)
    grown_s = view.grown_itl_s(newcomer.prompt_tokens)
    over = view.pressure + missing / (view.page_size * view.total_pages) - PAGES_FROM
    more_s = max(0.0, own_s - wait.least_own_s)
    return Terms(
        wait.urgency * (wait.haste * (view.backlog_s + own_s) + (1 - wait.haste) * more_s),
        DECODE_WEIGHT * output * grown_s,
        OTHERS_WEIGHT * view.running * (stall_s(own_s) + output * (grown_s - view.itl_s)),
        PAGES_S * (over / (1 - PAGES_FROM)) ** 2 if over > 0 and view.is_known else 0.0,
        DEGRADED_FACTOR if view.state == "degraded" else 1.0,
    )
