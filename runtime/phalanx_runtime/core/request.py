"""State of one request in the engine: its tokens, and how many of them are computed.

There are no phases: a request has `len(tokens)` tokens, of which `computed` are in its pages. New, preempted, partly prefilled
and decoding requests differ only in that difference; a sampled token is appended and makes it one again.

    [0, num_prompt) prompt · [num_prompt, len(tokens)) output, tokens delivered by another group first
    output index = position - num_prompt
"""

from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys
from phalanx_runtime.core.ngram import RequestSpeculation


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingHints:
    """Inputs of the scheduling policy, in seconds. `arrived_s`: arrival at the router, or here."""

    priority: int = 0
    tenant: str = ""
    arrived_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Request:
    """State of one request.

    tokens   |------- prompt -------|-- output --|        num_prompt <= len(tokens) <= max_len
    computed |==============>             |               tokens in the pages; `farthest` (|): before a preemption
    pages    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]               one for each page_size tokens
    keyed    |=======>                                    pages offered to the prefix cache
    sent     |================>                           pages that the ranks know
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
    """The ranks know [0, sent) of them; [0, keyed) are in the prefix cache, or were offered to it."""
    gone: bool = False
    """It ended or was aborted."""
    wishes: SchedulingHints = SchedulingHints()
    keys: PrefixKeys | None = None
    keyed: int = 0
    is_chained: bool = True
    """All pages in [0, keyed) have a key; false once another page had the key."""
    sent: int = 0
    in_flight: bool = False
    farthest: int = 0
    """Highest value of `computed`: tokens before it are recomputed after a preemption."""
    cached_tokens: int = 0
    lapsed_s: float | None = None
    """When its deadline passed."""
    told: int = 0
    """Prompt tokens whose logprobs were sent; they are not sent again after a preemption."""
    has_drawn: bool = False
    """A token was sampled here; `cached_tokens` is final."""
    is_frozen: bool = False
    """It gets no further step for now, and keeps pages and row."""
    is_held: bool = False
    """Arrived by a move and waits for its grammar: frozen until `release`."""
    alone: bool = False
    """It shares no step with other requests."""
    num_losses: int = 0
    """Number of preemptions."""
    found: int = 0
    """Tokens in pages found by key."""
    waits_since_s: float = 0.0
    """Start of its last wait for a row."""
    proposing: RequestSpeculation | None = None
    """State of its speculation."""
    is_cut: bool = False
    """Pages known to the ranks were freed: the ranks must drop those after `sent`."""
    strays: list[int] = field(default_factory=list)
    """Slots of the last `computed` tokens, accepted branches of a tree; the next step copies them to their positions."""

    @property
    def seniority(self) -> tuple[float, int]:
        """Order of arrival, here or at an earlier group: the smallest came first. All differ."""
        return self.wishes.arrived_s, self.order

    @property
    def placed(self) -> int:
        """Tokens in their own slots: others may read them, and they may move."""
        return self.computed - len(self.strays)

    @property
    def missing(self) -> int:
        """Tokens not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Output tokens so far, also those delivered by another group; also the index of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def outstanding_tokens(self) -> int:
        """Uncomputed tokens plus output tokens still allowed."""
        return self.max_len - self.computed

    def finish(self) -> wire.FinishReason | None:
        """Returns why the request ends after its last output token, if it does."""
        output = len(self.tokens) - self.num_prompt
        if output and output >= self.sampling.min_tokens and self.tokens[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_len else None


def make_request(handle: int, order: int, asked: wire.Request, max_model_len: int, now: float = 0.0) -> Request:
    """Returns the state of a new request. Its length ends at max_tokens or at the model's limit."""
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
            priority=asked.priority,
            tenant=asked.tenant,
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
    """Returns whether any penalty changes logits."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def needs_history(sampling: wire.Sampling) -> bool:
    """Returns whether sampling depends on earlier tokens other than through the model, or their logprobs are requested."""
    told = sampling.prompt_logprobs is not None
    return is_penalised(sampling) or told or bool(sampling.bad_words) or sampling.grammar is not None
