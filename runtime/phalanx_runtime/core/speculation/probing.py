"""Skips the search for draft tokens while they do not pay, and probes whether they do again.

    skip    after an unpaid search, the next LOOK_INTERVAL steps with as many decodes
    probe   one draft token after an interval of unpaid steps; expensive and vain probes lengthen the interval

A backfill over several steps counts as one probe with its draft token.
"""

import math

PROBE_INTERVAL = 16
"""Minimum interval, in steps with candidates."""
PROBE_SHARE = 0.01
"""Share of time of expensive probes."""
VAIN_PROBES = 4
"""Probes in vain that halve the share."""
MAX_INTERVAL = 512
LOOK_INTERVAL = 8
"""Steps between unpaid searches."""


def next_interval(cost: float, interval: int, num_vain: int) -> int:
    """Returns the interval after a probe that took `cost` plain steps. `num_vain`: earlier probes since draft tokens paid."""
    share = PROBE_SHARE / (1 + num_vain / VAIN_PROBES)
    return min(max(PROBE_INTERVAL, math.ceil(cost / share)), 2 * interval, MAX_INTERVAL)


class Probing:
    """Searches and probes of one engine."""

    __slots__ = (
        "_draft_unpaid_steps",
        "_interval",
        "_is_partial",
        "_num_vain",
        "_partial_cost",
        "_probe_step",
        "_undrafted_steps",
        "_unpaid_decodes",
        "_unpaid_step",
    )

    def __init__(self) -> None:
        self._undrafted_steps = 0
        """Steps since the last draft token."""
        self._interval = PROBE_INTERVAL
        self._num_vain = 0
        self._draft_unpaid_steps = 0
        """Steps since a model's drafts paid."""
        self._probe_step: int | None = None

        self._is_partial = False
        """The latest probe was a backfill."""
        self._partial_cost = 0.0
        self._unpaid_step: int | None = None
        """Latest unpaid search, if it allows skipping."""
        self._unpaid_decodes = 0

    @property
    def is_due(self) -> bool:
        """Whether a probe is due."""
        return self._undrafted_steps > self._interval

    @property
    def is_due_next(self) -> bool:
        """Whether a probe is due after one more unpaid step."""
        return self._undrafted_steps >= self._interval

    @property
    def drafts_pay(self) -> bool:
        """Whether a model's drafts paid recently; true initially."""
        return self._draft_unpaid_steps < PROBE_INTERVAL

    def skip(self, step: int, decodes: int) -> bool:
        """Returns whether this step skips the search; it then counts as unpaid."""
        is_recent = self._unpaid_step is not None and step - self._unpaid_step < LOOK_INTERVAL
        if not is_recent or decodes != self._unpaid_decodes or self.is_due_next:
            return False
        self._undrafted_steps += 1
        self._draft_unpaid_steps += 1
        return True

    def record_paid(self, has_drafts: bool) -> None:
        """Records a search with paying draft tokens. `has_drafts`: some of a draft model."""
        self._interval, self._unpaid_step = max(PROBE_INTERVAL, self._interval // 2), None
        self._num_vain //= 2
        self._draft_unpaid_steps = 0 if has_drafts else self._draft_unpaid_steps + 1

    def record_unpaid(self, step: int, decodes: int, may_skip: bool) -> None:
        """Records a search without paying draft tokens. `may_skip`: the next result would be equal."""
        self._undrafted_steps += 1
        self._draft_unpaid_steps += 1
        self._unpaid_step, self._unpaid_decodes = step if may_skip else None, decodes

    def record_draft(self) -> None:
        """Records that the step has draft tokens."""
        self._undrafted_steps, self._unpaid_step = 0, None

    def search_next(self) -> None:
        """Lets the next step search, to continue a backfill."""
        self._unpaid_step = None

    def start(self, step: int, is_partial: bool = False) -> None:
        """Records that this step is a probe, or with `is_partial` a backfill for one."""
        self._probe_step, self._is_partial = step, is_partial

    def record_cost(self, cost: float) -> None:
        """Records the cost of the latest probe in plain steps."""
        self._partial_cost += cost
        if not self._is_partial:
            self._interval = next_interval(self._partial_cost, self._interval, self._num_vain)
            self._num_vain += 1
            self._partial_cost = 0.0

    def was_probe(self, step: int) -> bool:
        """Returns whether this step was the latest probe."""
        return step == self._probe_step
