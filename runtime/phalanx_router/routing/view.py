"""A group as the router sees it, with derived estimates.

    token_s    = speed * t(M, B, C) / M              one prompt token; t: `phalanx_api.cost`, M: `max_num_batched_tokens`
    prompt_s   = (n - cached) * token_s + speed * a * (n^2 - cached^2) / 2      a: attention cost per token of context
    backlog_s  = the same over all queued prompt tokens
    step_s     = speed * t(p, B, C)                  without draft tokens
    itl_s      = step_s / speedup                    inter-token latency with speculation
    pressure   = (used + reserved + demanded pages) / all pages

All numbers include what this router sent after the group's last load report (`routing.ledger`).
"""

from dataclasses import dataclass, replace
from functools import cached_property

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork, attention_work
from phalanx_api.summary import Freshness
from phalanx_router.routing.ledger import request_pages

UNKNOWN = StepModel(fixed_s=0.02, token_s=1e-4, knee_tokens=0, context_s=1e-7, attention_s=0.0)
"""Orders groups without measured steps by queued work."""
NO_PREFIX = wire.HotPrefix(b"", 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapacity:
    """Constant for an incarnation."""

    total_pages: int = 1
    page_size: int = 16
    page_bytes: int = 0  # over all ranks; 0 if unknown
    max_num_seqs: int = 0  # 0 if unknown
    max_num_batched_tokens: int = 2048
    max_request_pages: int = 0  # 0: a request holds the pages of all its tokens
    disk_page_s: float = 0.0  # measured time to read a page from disk; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """New with each load report and dispatch."""

    waiting: int = 0
    running: int = 0
    unreported: int = 0  # part of `running` that no load report covers
    queued_prompt_tokens: int = 0  # not computed, of waiting and running requests
    queued_attention: float = 0.0  # sum of their context lengths
    context_tokens: int = 0
    prompt_tokens_per_step: float = 0.0  # moving average
    speedup: float = 1.0  # token rate of decodes, relative to decoding without draft tokens
    used_pages: int = 0  # held by running requests
    reserved_pages: int = 0
    demand_pages: int = 0  # needed by waiting requests
    steps_to_full: float | None = None  # until the page pool is exhausted; unset while idle
    hot_prefix: wire.HotPrefix = NO_PREFIX  # most used prefix

    def plus(self, requests: int, context_tokens: int, pages: int = 0) -> "GroupLoad":
        """Adds running requests, or removes them with negative counts."""
        return replace(
            self,
            running=max(0, self.running + requests),
            context_tokens=max(0, self.context_tokens + context_tokens),
            used_pages=max(0, self.used_pages + pages),
        )


@dataclass(frozen=True, kw_only=True)  # without slots: `cached_property` needs `__dict__`
class GroupView:
    """One group at one time."""

    key: str  # `LeaderLink.key`
    group: str = ""
    revision: str = ""
    model_hash: str = ""
    page_model: str = ""  # in page keys
    layout: str = ""  # pages move only between equal ones

    state: Freshness = "fresh"
    is_draining: bool = False
    has_report: bool = True
    has_recent_preemption: bool = False

    step_model: StepModel = UNKNOWN
    speed: float = 1.0  # relative step time; more than 1 is slow
    mean_output_tokens: float = 0.0  # of all groups of the model
    copy_bytes_per_s: float = 1e9  # measured

    capacity: GroupCapacity = GroupCapacity()
    load: GroupLoad = GroupLoad()

    @cached_property
    def token_s(self) -> float:
        """Seconds per additional prompt token."""
        tokens = self.capacity.max_num_batched_tokens
        work = StepWork(tokens, self.load.running, self.load.context_tokens)
        return self.speed * self.step_model.predict(work) / tokens

    @cached_property
    def backlog_s(self) -> float:
        """Seconds until a new request's first prompt token is computed."""
        return self.load.queued_prompt_tokens * self.token_s + self.attention_s * self.load.queued_attention

    @cached_property
    def attention_s(self) -> float:
        """Attention seconds per prompt token and token of its context."""
        return self.speed * self.step_model.attention_s

    def prompt_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to compute a prompt, at least its last token."""
        cached_tokens = max(0, min(cached_tokens, tokens - 1))
        return (tokens - cached_tokens) * self.token_s + self.attention_s * attention_work(tokens, cached_tokens)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step without draft tokens."""
        load = self.load
        return self.speed * self.step_model.predict(StepWork(int(load.prompt_tokens_per_step), load.running, load.context_tokens))

    @cached_property
    def itl_s(self) -> float:
        """Inter-token latency."""
        return self.step_s / self.load.speedup

    def itl_with_s(self, context_tokens: int) -> float:
        """`itl_s` with one more request of `context_tokens`."""
        model, load = self.step_model, self.load
        tokens = int(load.prompt_tokens_per_step) + load.running
        more_s = model.row_s + model.context_s * context_tokens + (model.token_s if tokens >= model.knee_tokens else 0.0)
        return self.itl_s + self.speed * more_s / load.speedup

    @cached_property
    def pressure(self) -> float:
        """Share of the pages that are used, reserved or demanded."""
        load = self.load
        return (load.used_pages + load.reserved_pages + load.demand_pages) / self.capacity.total_pages

    @cached_property
    def total_tokens(self) -> int:
        """Tokens that fill the page pool."""
        return self.capacity.page_size * self.capacity.total_pages

    @property
    def free_pages(self) -> int:
        """Pages neither used nor reserved."""
        return self.capacity.total_pages - self.load.used_pages - self.load.reserved_pages

    @property
    def free_share(self) -> float:
        """Share of the free pages."""
        return 1 - (self.load.used_pages + self.load.reserved_pages) / self.capacity.total_pages

    @property
    def hot_prefix_tokens(self) -> int:
        """Tokens of the hot prefix."""
        return self.load.hot_prefix.pages * self.capacity.page_size

    def pages_of(self, tokens: int) -> int:
        """Pages of a request of `tokens` tokens."""
        return request_pages(tokens, self.capacity.page_size, self.capacity.max_request_pages)

    def kept_tokens(self, tokens: float) -> float:
        """Tokens, of `tokens` of a request, whose pages it holds at once."""
        capacity = self.capacity
        return min(tokens, capacity.max_request_pages * capacity.page_size) if capacity.max_request_pages else tokens

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of the KV of a request of `tokens` tokens; 0 if unknown."""
        return self.kept_tokens(tokens) * self.capacity.page_bytes / self.capacity.page_size

    def plus(self, requests: int, context_tokens: int, pages: int = 0) -> "GroupView":
        """`GroupLoad.plus` as a view."""
        return replace(self, load=self.load.plus(requests, context_tokens, pages))


DEGRADED_AFTER_S, SUSPECT_AFTER_S, DEAD_AFTER_S = 0.25, 2.0, 5.0
"""Suspect and dead groups get no new requests while most groups report."""


def freshness(overdue_s: float) -> Freshness:
    """Freshness by the age of a load report."""
    if overdue_s < DEGRADED_AFTER_S:
        return "fresh"
    if overdue_s < SUSPECT_AFTER_S:
        return "degraded"
    return "suspect" if overdue_s < DEAD_AFTER_S else "dead"


def is_stale(state: Freshness) -> bool:
    """Whether the report is too old for routing."""
    return state in ("suspect", "dead")
