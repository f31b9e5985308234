"""State of one request in the engine, divided by owner.

There are no phases: new, preempted, partly prefilled and decoding requests differ only in `len(tokens)` and `num_computed`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys
from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_runtime.core.draft_tree import REQUEST_DECAY, AcceptanceRates
from phalanx_runtime.core.ngram import NgramProposer


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingHints:
    """Inputs of the scheduling policy."""

    priority: int = 0
    tenant: str = ""
    arrived_s: float = 0.0
    """Arrival at the router, or here."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Parameters that are fixed on arrival."""

    handle: int
    epoch: int
    order: int
    """Number of its arrival here."""
    sampling: wire.Sampling
    num_prompt: int
    max_len: int
    """Maximum number of tokens, prompt included."""
    pooling: wire.Pooling | None = None
    """It ends with a vector of its prompt, without a draw."""
    pair_start: int = 0
    """First token of the second of two texts; 0: one text."""
    stop_token_ids: frozenset[int]
    runs_alone: bool
    """It shares no step with other requests."""
    hints: SchedulingHints
    adapter: int = 0
    """Slot of its adapter, from 1; 0: none."""
    images: Sequence[wire.Image] = ()
    """Of the prompt, in the order of their tokens."""
    image_tokens: Mapping[int, int]
    """See `wire.placeholder_numbers`."""
    id: str = ""
    """The client's or the router's name of the request, for records."""
    seniority: tuple[float, int] = field(init=False)
    """Sorts by arrival; unique."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seniority", (self.hints.arrived_s, self.order))


@dataclass(slots=True, kw_only=True)
class RequestPages:
    """Pages, written by `PrefixSharing` and the writers named below.

    ids      [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]
    dropped  |===>                                 `NULL_PAGE`: no layer reads these tokens any more
    keyed    |========>                            offered to the prefix cache
    sent     |================>                    known to the ranks
    """

    keys: PrefixKeys
    ids: list[int] = field(default_factory=list)
    """`Composer` and `Speculator` append, `Speculator` removes."""
    num_dropped: int = 0
    part_start: int = 0
    """Index of the first page whose part the request holds, if pages have parts. `WindowParts` writes."""
    part_end: int = 0
    """Index after the last one."""
    first_tokens: int = 1
    """Tokens that one step may have to compute at once: those of an image that attend to each other."""
    is_pinned: bool = False
    """A move reads the pages, so none is dropped. `Scheduler` sets it."""
    num_keyed: int = 0
    is_chained: bool = True
    """All keyed pages have their key; false once another page had one already."""
    found_tokens: int = 0
    """Tokens in pages found by key."""
    cached_tokens: int = 0
    """Prompt tokens that others computed; final once `has_sampled`."""
    snapshots: list[int] = field(default_factory=list)
    """Positions at which chunks of the prompt end for a snapshot. `SnapshotSharing` writes this and the next field."""
    output_snapshot: bytes = b""
    """Page key of the snapshot that its output has, if any."""
    num_sent: int = 0
    """`StepBuilder` advances, `Speculator` reduces it."""
    must_truncate: bool = False
    """The ranks must drop pages after `num_sent`. Same writers."""
    misplaced: list[int] = field(default_factory=list)
    """Slots of the last computed tokens, accepted in a tree, until the next step copies them into place. `Scheduler` writes."""

    @property
    def held(self) -> list[int]:
        """The pages that the request holds."""
        return self.ids[self.num_dropped :] if self.num_dropped else self.ids

    @property
    def with_parts(self) -> list[int]:
        """The pages whose parts the request holds."""
        return self.ids[self.part_start : self.part_end]


@dataclass(slots=True, kw_only=True)
class SchedulingState:
    """Written by the package `scheduling`."""

    waits_since_s: float = 0.0
    """Start of the last wait for a row."""
    deadline_missed_s: float | None = None
    """Set by the `Deadline` policy."""
    awaits_grammar: bool = False
    """A moved request stays frozen until its grammar is compiled."""
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class DeliveryState:
    """Written by `Scheduler.commit`."""

    num_prompt_details: int = 0
    """Prompt tokens with delivered logprobs."""
    has_sampled: bool = False


@dataclass(slots=True, kw_only=True)
class RequestSpeculation:
    """Written by the package `speculation`. The default is no speculation."""

    method: Method = "none"
    max_tokens: int = 0
    """Maximum draft tokens per step."""
    tree: Tree = CHAIN
    ngrams: NgramProposer = field(default_factory=NgramProposer)
    rates: AcceptanceRates = field(default_factory=lambda: AcceptanceRates(REQUEST_DECAY))
    num_drafted_pages: int = 0
    """Leading pages with the draft model's KV in all slots."""
    last_step: int = 0
    """Last one with draft tokens."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One request: the fields that every step uses, and a record per owner.

    tokens        |------- prompt -------|-- output --|        num_prompt <= len(tokens) <= max_len
    num_computed  |==============>      |                      `max_computed` (|): before a preemption
    """

    params: RequestParams
    tokens: list[int]
    """Prompt and output tokens; `Scheduler` appends."""
    num_computed: int = 0
    """Tokens that the plans so far compute. `StepBuilder`, for found tokens `PrefixSharing`, for draft tokens `TokenDelivery`
    advance it."""
    max_computed: int = 0
    """Highest `num_computed` so far: below it tokens are recomputed."""
    row: int | None = None
    """`RunningSet` assigns it while the request runs."""
    in_flight: int = 0
    """Plans in flight that compute its tokens. `StepBuilder` and `Scheduler` count."""
    num_pending: int = 0
    """Tokens after `tokens` that these plans sample. Same writers."""
    has_ended: bool = False
    """Finished or aborted; `Scheduler` sets it."""
    is_frozen: bool = False
    """In no step, but keeps pages and row; `Scheduler` sets it."""
    pages: RequestPages
    scheduling: SchedulingState = field(default_factory=SchedulingState)
    delivery: DeliveryState = field(default_factory=DeliveryState)
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)

    @property
    def num_in_place(self) -> int:
        """Computed tokens in their own slots, so they can be shared and moved."""
        return self.num_computed - len(self.pages.misplaced)

    @property
    def num_tokens(self) -> int:
        """Tokens with pending ones."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to compute, with pending ones."""
        return self.num_tokens - self.num_computed

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step can be planned without the pending tokens: draft tokens depend on them, and so does the end of the
        request unless its length allows another token. A pooled request has none."""
        if self.params.pooling is not None:
            return True
        return self.speculation.method == "none" and self.num_tokens < self.params.max_len

    def page_tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Returns tokens for comparison with those of pages: those of images differ by image."""
        tokens, numbers = self.tokens[start:stop], self.params.image_tokens
        return tokens if not numbers else [numbers.get(position, token) for position, token in enumerate(tokens, start)]

    @property
    def num_output(self) -> int:
        """Output tokens, those of other groups included; index of the next one."""
        return len(self.tokens) - self.params.num_prompt

    @property
    def outstanding_tokens(self) -> int:
        """Uncomputed tokens plus output tokens still allowed."""
        return self.params.max_len - self.num_computed

    @property
    def remaining_output(self) -> int:
        """Output tokens still allowed."""
        return self.params.max_len - len(self.tokens)

    def finish_reason(self) -> wire.FinishReason | None:
        """Returns the reason if the last token ends the request. A vector, not a token, ends a pooled one."""
        tokens, params = self.tokens, self.params
        if params.pooling is not None:
            return None
        num_output = len(tokens) - params.num_prompt
        if num_output and num_output >= params.sampling.min_tokens and tokens[-1] in params.stop_token_ids:
            return "stop"
        return "length" if len(tokens) >= params.max_len else None


def make_request(
    handle: int, order: int, submitted: wire.Request, max_model_len: int, *, keys: PrefixKeys, now: float = 0.0, adapter: int = 0
) -> Request:
    """Returns the state of a new request. `adapter`: slot of its adapter."""
    sampling = submitted.sampling
    params = RequestParams(
        handle=handle,
        id=submitted.id,
        epoch=submitted.epoch,
        order=order,
        adapter=adapter,
        images=submitted.images,
        image_tokens=wire.placeholder_numbers(submitted.images),
        sampling=sampling,
        num_prompt=len(submitted.prompt),
        max_len=min(len(submitted.prompt) + sampling.max_tokens, max_model_len),
        pooling=submitted.pooling,
        pair_start=submitted.pair_start,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        runs_alone=submitted.alone,
        hints=SchedulingHints(
            priority=submitted.priority,
            tenant=submitted.tenant,
            arrived_s=now - submitted.waited_ms / 1e3,
            ttft_s=_seconds(submitted.ttft_target_ms),
            tpot_s=_seconds(submitted.tpot_target_ms),
            deadline_s=_seconds(submitted.deadline_ms),
        ),
    )
    return Request(
        params=params,
        tokens=submitted.prompt + submitted.delivered,
        pages=RequestPages(keys=keys, first_tokens=max(1, wire.whole_tokens(submitted.images))),
        scheduling=SchedulingState(waits_since_s=now),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def has_penalties(sampling: wire.Sampling) -> bool:
    """Returns whether any penalty changes logits."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def needs_history(sampling: wire.Sampling) -> bool:
    """Returns whether the sampling rank needs earlier tokens, for sampling or prompt logprobs."""
    has_prompt_logprobs = sampling.prompt_logprobs is not None
    return has_penalties(sampling) or has_prompt_logprobs or bool(sampling.bad_words) or sampling.grammar is not None
