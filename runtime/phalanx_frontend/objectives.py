"""Counts of requests and tokens that met or missed the service level objectives.

`answered` counts requests: good with a complete response, bad with an error of the service. Errors of the client, its own
limits included, and disconnects count in neither. `ttft` counts first tokens, and clients that left when theirs was late; `itl`
counts the gaps between tokens; both while they have a target.
"""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from phalanx_api.summary import LatencyObjectives

Objective = Literal["availability", "ttft", "itl"]
CLIENT_LIMITS = frozenset({"rate_limit_exceeded", "insufficient_quota"})
"""Error codes of a request above the limits or the daily budget of its API key."""


def no_targets() -> LatencyObjectives:
    """Returns no targets."""
    return LatencyObjectives()


def is_fault(status: int, code: str | None) -> bool:
    """Whether an error is the service's: 5xx, and 429 for lack of capacity."""
    return status >= 500 or (status == 429 and code not in CLIENT_LIMITS)


class ObjectiveCounter:
    """Counts the events of each objective. `targets`: the present ones, which may change."""

    def __init__(self, registry: CollectorRegistry, prefix: str, targets: Callable[[], LatencyObjectives] = no_targets) -> None:
        text = (
            "Requests (availability), first tokens (ttft) and gaps between tokens (itl) that met their objective (good) or not."
        )
        counter = Counter(f"{prefix}_objective_events", text, ("objective", "outcome"), registry=registry)
        self._targets = targets
        self._good = {objective: counter.labels(objective, "good") for objective in get_args(Objective)}
        self._bad = {objective: counter.labels(objective, "bad") for objective in get_args(Objective)}

    def answered(self) -> None:
        """Counts a request with a complete response."""
        self._good["availability"].inc()

    def failed(self, status: int, code: str | None) -> None:
        """Counts a request that ended with an error, if it is the service's."""
        if is_fault(status, code):
            self._bad["availability"].inc()

    def first_token(self, seconds: float) -> None:
        """Counts a first token after `seconds`."""
        self._count("ttft", seconds, self._targets().ttft_s, 1)

    def left_without_token(self, seconds: float) -> None:
        """Counts a client that left after `seconds`, if its first token was late by then: a hung service would count nothing."""
        target_s = self._targets().ttft_s
        if target_s is not None and seconds > target_s:
            self._bad["ttft"].inc()

    def gaps(self, seconds: float, count: int) -> None:
        """Counts gaps of `seconds` between tokens."""
        self._count("itl", seconds, self._targets().itl_s, count)

    def _count(self, objective: Objective, seconds: float, target_s: float | None, count: int) -> None:
        if target_s is not None:
            (self._good if seconds <= target_s else self._bad)[objective].inc(count)
