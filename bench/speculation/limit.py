"""How fast speculation could be at best on a machine, from what was measured with all proposals made.

    tokens(k) = 1 + sum of the shares of the first k places             of a chain, all before a place accepted
    time(k)   = plain + k * (pass + token)                              seconds of a step for all requests
    ratio(k)  = tokens(k) * plain / time(k)                             k = 0: 1

Below 1 for every k nothing that chooses depths can be faster than plain decoding, and what tries is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of steps of so many requests: without proposals, of one pass of the draft for all of them, and what one proposal
    for each adds to the step that verifies it."""

    plain_s: float
    pass_s: float
    token_s: float


def times_of(plain_s: float, step_s: float, draft_s: float, depth: int) -> Times:
    """From the means of plain steps, of steps with so many proposals for each request, and of the drafts in these."""
    return Times(plain_s, draft_s / depth, max(0.0, step_s - draft_s - plain_s) / depth)


def ratios(times: Times, accepted: Sequence[float]) -> list[float]:
    """By how much steps with 1, 2, ... proposals for each request are faster than plain ones. accepted: of each place the share
    of steps in which it is accepted with all before it."""
    found, tokens = [], 1.0
    for depth, share in enumerate(accepted, 1):
        tokens += share
        found.append(tokens * times.plain_s / (times.plain_s + depth * (times.pass_s + times.token_s)))
    return found


def line_of(times: Times, accepted: Sequence[float]) -> str:
    """What limits a row, in one line."""
    each = " ".join(f"{ratio:.2f}" for ratio in ratios(times, accepted))
    parts = f"plain step {times.plain_s * 1e3:.2f} ms, pass {times.pass_s * 1e3:.2f} ms, proposal {times.token_s * 1e3:.2f} ms"
    return f"{parts}; at best by depth: {each}"
