"""One request in the engine: the tokens it wants computed, and how many of them are.

No phases: a request wants `len(tokens)` tokens in its pages and has `computed` of them. Fresh, preempted, half prefilled and
decoding differ only in that difference; a draw appends a token, and the difference is one again.

    [0, num_prompt) prompt · [num_prompt, len(tokens)) output, what another group delivered first
    output index = position - num_prompt
"""

from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys
from phalanx_runtime.core.ngram import RequestSpeculation


@dataclass(frozen=True, slots=True)
class SchedulingHints:
    """What a request wants of the policy, in seconds; None is no wish. `arrived_s`: when it came to its router, or here."""

    priority: int = 0
    tenant: str = ""
    arrived_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


@dataclass(slots=True)
class Request:
    """State of one request.

        tokens   |------- prompt -------|-- output --|        num_prompt <= len(tokens) <= max_len
        computed |==============>             |               tokens in the pages; `farthest` (|): before a preemption
        pages    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]               one for each page_size tokens
        keyed    |=======>                                    pages offered to the prefix cache
        sent     |================>                           pages that the ranks know

    `order` says who came here first; `row` is None while it waits; `gone` once it ended or was aborted.

    [0, sent) of `pages` the ranks know · [0, keyed) of `pages` are in the prefix cache, or were
    offered to it until one was there already (`is_chained`). `farthest` is the highest
    value that `computed` ever had: what lies before it is recomputed after a preemption. `lapsed_s`: when its due time passed.
    `told`: the last prompt token whose details were sent: a prompt that is recomputed is not told again.
    `has_drawn`: whether a token was drawn for it here; from then on `cached_tokens` stays.
    `alone`: it shares no step with others. `is_frozen`: no further step for now, pages and row stay. `num_losses`: how often it
    lost its pages.
    [0, found) of `tokens` are in pages that were found by key, computed or to be computed by others. `waits_since_s`: since when
    it waits for a row, or waited.
    """

    handle: int
    epoch: int
    order: int
    sampling: wire.Sampling
    num_prompt: int
    tokens: list[int]
    max_len: int
    stop_token_ids: frozenset[int]
    computed: int = 0
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    gone: bool = False
    wishes: SchedulingHints = SchedulingHints()
    keys: PrefixKeys | None = None
    keyed: int = 0
    is_chained: bool = True
    sent: int = 0
    in_flight: bool = False
    farthest: int = 0
    cached_tokens: int = 0
    lapsed_s: float | None = None
    told: int = 0
    has_drawn: bool = False
    is_frozen: bool = False
    is_held: bool = False
    """Came with its pages and waits for its grammar: frozen until `release`, whoever thaws it."""
    alone: bool = False
    num_losses: int = 0
    found: int = 0
    waits_since_s: float = 0.0
    proposing: RequestSpeculation | None = None
    """What is known of it where tokens are proposed for it."""
    is_cut: bool = False
    """Pages that the ranks know were given back: they have to forget those after `sent`."""
    strays: list[int] = field(default_factory=list)
    """Slots in which the last of the `computed` tokens lie: accepted branches of a tree. The next step puts them in place."""

    @property
    def seniority(self) -> tuple[float, int]:
        """Who came first, here or to another group before: the smallest. No two are equal."""
        return self.wishes.arrived_s, self.order

    @property
    def placed(self) -> int:
        """How many tokens lie in their places: others may read them, and they may move."""
        return self.computed - len(self.strays)

    @property
    def missing(self) -> int:
        """How many wanted tokens are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Output tokens so far, those delivered by another group included; also the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def outstanding_tokens(self) -> int:
        """Tokens not yet computed plus output tokens still allowed."""
        return self.max_len - self.computed

    def finish(self) -> wire.FinishReason | None:
        """Why the request ends after its last output token, or None when it goes on."""
        output = len(self.tokens) - self.num_prompt
        if output and output >= self.sampling.min_tokens and self.tokens[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def make_request(handle: int, order: int, asked: wire.Request, max_model_len: int, now: float = 0.0) -> Request:
    """State of a request that is asked for now. Its length ends at max_tokens or at the model's limit, whichever is first."""
    sampling = asked.sampling
    return Request(
        handle=handle,
        epoch=asked.epoch,
        order=order,
        sampling=sampling,
        num_prompt=len(asked.prompt),
        tokens=asked.prompt + asked.delivered,
        max_len=min(len(asked.prompt) + sampling.max_tokens, max_model_len),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        alone=asked.alone,
        wishes=SchedulingHints(
            asked.priority,
            asked.tenant,
            arrived_s=now - asked.waited_ms / 1e3,
            ttft_s=_seconds(asked.ttft_target_ms),
            tpot_s=_seconds(asked.tpot_target_ms),
            deadline_s=_seconds(asked.deadline_ms),
        ),
        waits_since_s=now,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def is_penalised(sampling: wire.Sampling) -> bool:
    """Whether any penalty changes a score."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def needs_history(sampling: wire.Sampling) -> bool:
    """Whether the next draw depends on the tokens before it otherwise than through the model, or they are to be told."""
    told = sampling.prompt_logprobs is not None
    return is_penalised(sampling) or told or bool(sampling.bad_words) or sampling.grammar is not None
