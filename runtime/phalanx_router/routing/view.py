"""State of a group as the router sees it, and estimates from it: backlog, time to first token, page pressure.

    token_s    = speed * t(room, B, C) / room        cost of one prompt token; t: `phalanx_api.cost`
    prompt_s   = (n - held) * token_s + speed * a * (n^2 - held^2) / 2      prompt of n tokens, `held` of them in pages
    backlog_s  = the same over all prompt tokens queued before a new request; a: attention cost per token of context
    step_s     = speed * t(p, B, C)                  step time without draft tokens
    itl_s      = step_s / speedup                    time between tokens with speculation
    pressure   = (used + reserved + waiting demand) / all pages

Every number includes what this router sent since the group's last load report (`routing.ledger`). A group without measured steps
uses `UNKNOWN`.
"""

from dataclasses import dataclass
from functools import cached_property

from phalanx_api.cost import StepModel, StepWork, attended
from phalanx_api.summary import Freshness

UNKNOWN = StepModel(fixed_s=0.02, token_s=1e-4, knee_tokens=0, context_s=1e-7, attention_s=0.0)
"""Placeholder that orders groups by the amount of queued work."""


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """One group at one time. Tokens, pages and requests are counts."""

    # Leader pod, connection and incarnation: a restarted group gets a new key, so its past failures do not count.
    key: str
    group: str = ""
    revision: str = ""
    model_hash: str = ""
    layout: str = ""
    state: Freshness = "fresh"
    draining: bool = False
    model: StepModel = UNKNOWN
    # Measured step time over that of groups of the same shape; 1 is usual.
    speed: float = 1.0
    # Token budget of one step.
    room: int = 2048
    waiting: int = 0
    running: int = 0
    # Prompt tokens not yet computed, of waiting and running requests.
    queued_prompt_tokens: int = 0
    # Sum of the context lengths of those tokens.
    queued_attended: float = 0.0
    context_tokens: int = 0
    # Moving averages.
    prompt_tokens_per_step: float = 0.0
    mean_output_tokens: float = 0.0
    total_pages: int = 1
    page_size: int = 16
    # Held by running requests.
    used_pages: int = 0
    reserved_pages: int = 0
    # Pages that waiting requests will need.
    demand_pages: int = 0
    recently_preempted: bool = False
    # Steps until the pool is exhausted at one token per request and step; unset while idle.
    steps_to_full: float | None = None
    outstanding_tokens: int = 0
    # Sum over all ranks; 0 when unknown, and transfers then count as free.
    page_bytes: int = 0
    # Measured KV transfer rate.
    copy_bytes_per_s: float = 1e9
    # Share of the recent prompt tokens that belongs to the most used prefix.
    prefix_share: float = 0.0
    # Key of the last page of that prefix.
    prefix: bytes = b""
    prefix_tokens: int = 0
    # Running requests that no load report covers yet.
    unseen: int = 0
    # Maximum number of running requests; 0 when unknown.
    max_num_seqs: int = 0
    # Whether the group has sent a load report.
    is_known: bool = True
    # Tokens per step and request with speculation.
    speedup: float = 1.0

    @cached_property
    def token_s(self) -> float:
        """Seconds per additional prompt token."""
        work = StepWork(self.room, self.running, self.context_tokens)
        return self.speed * self.model.predict(work) / self.room

    @cached_property
    def backlog_s(self) -> float:
        """Seconds until the first prompt token of a new request is computed."""
        return self.queued_prompt_tokens * self.token_s + self.attend_s * self.queued_attended

    @property
    def attend_s(self) -> float:
        """Attention seconds per prompt token and token of its context."""
        return self.speed * self.model.attention_s

    def prompt_s(self, tokens: int, held: int = 0) -> float:
        """Seconds to compute a prompt of `tokens`, the first `held` of them in pages; at least one token is computed."""
        held = max(0, min(held, tokens - 1))
        return (tokens - held) * self.token_s + self.attend_s * attended(tokens, held)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step without draft tokens."""
        work = StepWork(int(self.prompt_tokens_per_step), self.running, self.context_tokens)
        return self.speed * self.model.predict(work)

    @cached_property
    def itl_s(self) -> float:
        """Seconds between two tokens of a running request."""
        return self.step_s / self.speedup

    def grown_itl_s(self, context_tokens: int) -> float:
        """`itl_s` with one more request of `context_tokens`."""
        model, tokens = self.model, int(self.prompt_tokens_per_step) + self.running
        more_s = model.row_s + model.context_s * context_tokens + (model.token_s if tokens >= model.knee_tokens else 0.0)
        return self.itl_s + self.speed * more_s / self.speedup

    @cached_property
    def pressure(self) -> float:
        """Share of the pages that are used, reserved or needed by waiting requests; above 1 some requests cannot run."""
        return (self.used_pages + self.reserved_pages + self.demand_pages) / self.total_pages

    @property
    def free_share(self) -> float:
        """Share of the pages that are neither used nor reserved."""
        return 1 - (self.used_pages + self.reserved_pages) / self.total_pages


# Freshness of a load report by its age: fresh < 250 ms <= degraded < 2 s <= suspect < 5 s <= dead.
# The age counts from when the next report is due: the longest recent step after the last report. The cost of a degraded group
# is raised; a suspect or dead one gets no new requests while most others still report. For a group that was idle at its last
# report the age counts from the next request sent to it.

DEGRADED_AFTER_S, SUSPECT_AFTER_S, DEAD_AFTER_S = 0.25, 2.0, 5.0


def freshness(silent_s: float) -> Freshness:
    """Returns the freshness of a group with a report overdue by `silent_s` seconds."""
    if silent_s < DEGRADED_AFTER_S:
        return "fresh"
    if silent_s < SUSPECT_AFTER_S:
        return "degraded"
    return "suspect" if silent_s < DEAD_AFTER_S else "dead"


def is_stale(state: Freshness) -> bool:
    """Returns whether the report is too old to choose by."""
    return state in ("suspect", "dead")
