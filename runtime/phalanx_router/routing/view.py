"""What the router knows of a group when it chooses or moves, and what follows from it: backlog, time to first token, pressure.

    token_s    = speed * t(room, B, C) / room        what one prompt token costs there, t of `phalanx_api.cost`
    prompt_s   = (n - held) * token_s + speed * a * (n^2 - held^2) / 2      a prompt of n tokens of which pages hold some
    backlog_s  = the same over all prompt tokens that are to be computed before a newcomer, a its cost of attention
    step_s     = speed * t(p, B, C)                  time of a step without proposals
    itl_s      = step_s / speedup                    time between tokens, which come faster where some are proposed
    pressure   = (used + reserved + waiting demand) / all pages

Every number contains what this router sent there since the group last reported (`route.ledger`). A group that has not measured
its steps yet is taken for one that costs `UNKNOWN`.
"""

from dataclasses import dataclass
from functools import cached_property

from phalanx_api.cost import StepModel, StepWork, attended
from phalanx_api.summary import Freshness

UNKNOWN = StepModel(fixed_s=0.02, token_s=1e-4, knee_tokens=0, context_s=1e-7, attention_s=0.0)
"""Any model that orders groups by what they have in hand."""


@dataclass(frozen=True)
class GroupView:
    """One group as of now. Tokens, pages and requests are counts.

    key: leader pod, connection and incarnation; a group that came back is another key, so that its past failure no longer counts.
    room: tokens that a step may hold. used_pages: held by running requests. demand_pages: what waiting ones will need.
    queued_prompt_tokens: not computed yet, of waiting and running requests; queued_attended: the sum of their contexts.
    prompt_tokens_per_step, mean_output_tokens: lately.
    speed: measured time of a step over what groups of the same shape take; 1 is usual. speedup: by how much tokens come faster
    than one a step. steps_to_full: of a token for each request; None when nothing runs.
    page_bytes: of all ranks together; 0 is not told, and copies are taken for free. copy_bytes_per_s: what transfers reach.
    prefix_share: of the prompt tokens that came lately, the part of the heaviest prefix; prefix: the key of its last page.
    unseen: of the requests that run, those that no report has told of yet. max_num_seqs: how many may run, 0 when not told.
    is_known: whether it has reported at all.
    """

    key: str
    group: str = ""
    revision: str = ""
    model_hash: str = ""
    layout: str = ""
    state: Freshness = "fresh"
    draining: bool = False
    model: StepModel = UNKNOWN
    speed: float = 1.0
    room: int = 2048
    waiting: int = 0
    running: int = 0
    queued_prompt_tokens: int = 0
    queued_attended: float = 0.0
    context_tokens: int = 0
    prompt_tokens_per_step: float = 0.0
    mean_output_tokens: float = 0.0
    total_pages: int = 1
    page_size: int = 16
    used_pages: int = 0
    reserved_pages: int = 0
    demand_pages: int = 0
    preempted_lately: bool = False
    steps_to_full: float | None = None
    outstanding_tokens: int = 0
    page_bytes: int = 0
    copy_bytes_per_s: float = 1e9
    prefix_share: float = 0.0
    prefix: bytes = b""
    prefix_tokens: int = 0
    unseen: int = 0
    max_num_seqs: int = 0
    is_known: bool = True
    speedup: float = 1.0

    @cached_property
    def token_s(self) -> float:
        """Seconds that one more prompt token costs here."""
        work = StepWork(self.room, self.running, self.context_tokens)
        return self.speed * self.model.predict(work) / self.room

    @cached_property
    def backlog_s(self) -> float:
        """Seconds until a newcomer's first prompt token is computed."""
        return self.queued_prompt_tokens * self.token_s + self.attend_s * self.queued_attended

    @property
    def attend_s(self) -> float:
        """Seconds for each token of context of a prompt token."""
        return self.speed * self.model.attention_s

    def prompt_s(self, tokens: int, held: int = 0) -> float:
        """Seconds to compute a prompt of so many tokens of which pages hold the first ones; of one token at least."""
        held = max(0, min(held, tokens - 1))
        return (tokens - held) * self.token_s + self.attend_s * attended(tokens, held)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step without proposals."""
        work = StepWork(int(self.prompt_tokens_per_step), self.running, self.context_tokens)
        return self.speed * self.model.predict(work)

    @cached_property
    def itl_s(self) -> float:
        """Seconds between two tokens of a running request."""
        return self.step_s / self.speedup

    def grown_itl_s(self, context_tokens: int) -> float:
        """The same with one more request, of so many tokens."""
        model, tokens = self.model, int(self.prompt_tokens_per_step) + self.running
        more_s = model.row_s + model.context_s * context_tokens + (model.token_s if tokens >= model.knee_tokens else 0.0)
        return self.itl_s + self.speed * more_s / self.speedup

    @cached_property
    def pressure(self) -> float:
        """Share of the pages that are used, reserved or wanted; above 1 some requests cannot run."""
        return (self.used_pages + self.reserved_pages + self.demand_pages) / self.total_pages

    @property
    def free_share(self) -> float:
        """Share of the pages that nobody uses or was promised."""
        return 1 - (self.used_pages + self.reserved_pages) / self.total_pages


# How far a group's report can be trusted by its age.
#     fresh < 250 ms <= degraded < 2 s <= suspect < 5 s <= dead
# The age begins where the next report could be: as long after the last one as the longest of its latest steps took. A
# degraded group counts dearer, a suspect or dead one gets no new requests while most others still report. A group that had
# nothing to do when it last reported has nothing to tell until something is sent there: its age counts from then.

DEGRADED_AFTER_S, SUSPECT_AFTER_S, DEAD_AFTER_S = 0.25, 2.0, 5.0


def freshness(silent_s: float) -> Freshness:
    """The state of a group that had something to tell for so long, and told nothing."""
    if silent_s < DEGRADED_AFTER_S:
        return "fresh"
    if silent_s < SUSPECT_AFTER_S:
        return "degraded"
    return "suspect" if silent_s < DEAD_AFTER_S else "dead"


def is_stale(state: Freshness) -> bool:
    """Whether the report is too old to choose by."""
    return state in ("suspect", "dead")
