"""Computes the best possible speed of speculation from measured acceptance rates and times.

    tokens(k) = 1 + sum of the cumulative acceptance rates of the first k positions
    time(k)   = plain + k * (pass + token)                              seconds of a step for all requests
    ratio(k)  = tokens(k) * plain / time(k)                             k = 0: 1

If ratio(k) < 1 for every k, no choice of draft lengths is faster than plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of steps for one number of requests."""

    plain_s: float  # a step without draft tokens
    pass_s: float  # one draft pass for all requests
    token_s: float  # addition to a step for verifying one draft token per request


def times_of(plain_s: float, step_s: float, draft_s: float, depth: int) -> Times:
    """Returns the times from the means of plain steps, of steps with `depth` draft tokens per request, and of their drafting."""
    return Times(plain_s, draft_s / depth, max(0.0, step_s - draft_s - plain_s) / depth)


def ratios(times: Times, accepted: Sequence[float]) -> list[float]:
    """Returns the speed of steps with 1, 2, ... draft tokens per request relative to plain steps.

    `accepted`: for each position the share of steps that accept it and all before it.
    """
    result, tokens = [], 1.0
    for depth, share in enumerate(accepted, 1):
        tokens += share
        result.append(tokens * times.plain_s / (times.plain_s + depth * (times.pass_s + times.token_s)))
    return result


def describe(times: Times, accepted: Sequence[float]) -> str:
    ratio_text = " ".join(f"{ratio:.2f}" for ratio in ratios(times, accepted))
    plain_ms, pass_ms, token_ms = (1e3 * seconds for seconds in (times.plain_s, times.pass_s, times.token_s))
    parts = f"plain step {plain_ms:.2f} ms, draft pass {pass_ms:.2f} ms, verification per token {token_ms:.2f} ms"
    return f"{parts}; at best with 1, 2, ... draft tokens: {ratio_text}"
