"""Frames of the link between a router and a group's leader, and of the socket between the HTTP process and rank 0.

One WebSocket per router and leader carries them as msgpack; each message is one frame. A router sends `Submit`,
`Abort` and `Fetch`; a leader sends `Welcome` first, then `Tokens` (one per engine step, with the tokens of all of that
router's requests), `Refused`, `Load`, `State` and `Assets`. The engine socket speaks the same `Submit`, `Abort`,
`Tokens`, `Refused`, `Load` and `PageChanges`.

Requests are named by a small integer handle that the sender of `Submit` chooses, unique on its connection. Every token
is (request, epoch, index, token): a receiver delivers it only if the epoch is current and the index is next.

Structs are arrays on the wire: a field is added only at the end and with a default.
"""

import hashlib
from typing import Literal

import msgspec

from phalanx_api import moves

PROTOCOL_VERSION = 1
"""Version of the link. The handshake refuses a peer of another version."""
LINK_PATH = "/link"
"""Path of the WebSocket on the leader's HTTP port. The upgrade carries `Authorization: Bearer <service token>`."""

FinishReason = Literal["stop", "length"]
Cause = Literal["", "outside", "alone"]
"""Why an incarnation ended: perhaps any request that ran; nothing inside (a pod left); or, of all requests, only one alone."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must match: a JSON schema, a regular expression, or a Lark grammar as llguidance reads them."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """How tokens of one request are drawn and when it ends. Already validated by the door.

    `temperature` 0 is greedy. `top_k` None keeps every token. `stop_token_ids` ends the request with reason "stop"
    after the token was delivered; the door puts the model's end-of-sequence ids there unless `ignore_eos` was asked.
    The draw of token t at output index j depends on (seed, j, t) alone, so that a replay gives equal tokens.
    Penalties, bias, `bad_words` (token sequences that never appear whole) and `grammar` change scores before the draw; they
    follow from the request's tokens alone. `allowed_token_ids` None allows all. `logprobs` k asks for each token's logprob and
    those of the k most probable ones; `prompt_logprobs` the same of prompt tokens. `return_gaps` asks for `TokenDetail.gap`.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    return_gaps: bool = False


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to be generated. `delivered` are output tokens that the client already has: the next index is their count.

    `epoch` rises when a group that had the request is lost, not when one refused it: above 0 the stream has begun.
    `priority` as in vLLM: lower goes first. Targets and the deadline are milliseconds from the arrival at the engine; None is no
    wish. `tenant` and `cache_salt` separate what requests may share: pages of the prefix cache are shared within equal pairs.
    """

    id: str
    epoch: int
    prompt: list[int]
    delivered: list[int]
    sampling: Sampling
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    deadline_ms: float | None = None
    alone: bool = False
    """Compute it in steps of its own: two groups died under it, and it must not take others along."""
    can_resume: bool = False
    """Its client may ask for the rest at another router: when its router is lost it is an orphan, and not aborted."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start this request under this handle; with `move`, on the pages that came with that move."""

    handle: int
    request: Request
    move: str = ""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """To the target of a move (`phalanx_api.moves`): reserve pages for this request for `lease_s`, say what you hold of it."""

    move: str
    request: Request
    lease_s: float = 10.0


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Give me, under this handle, this tenant's stream of this id, whose router was lost. Answers: Adopted, Refused with 404."""

    handle: int
    request_id: str
    tenant: str = ""


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag="adopted"):
    """The stream is yours: the request with all its tokens so far in `delivered`. The epoch stays, for so does the group.

    `finish`: why it has ended, if it has. With `runs` its next tokens follow; else it goes on only where it is submitted again.
    """

    handle: int
    request: Request
    finish: FinishReason | None = None
    runs: bool = True


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget these requests. Unknown handles are no error: the request may just have ended."""

    handles: list[int]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the `Assets` of this hash."""

    assets_hash: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a router. `instance` is drawn anew each time it starts."""

    protocol_version: int
    router: str
    instance: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """First frame of a leader, in answer to `Hello`."""

    protocol_version: int
    group: str
    revision: str
    page_size: int
    assets_hash: str


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The request ended by itself; its last token is in the same frame or an earlier one."""

    handle: int
    epoch: int
    reason: FinishReason
    cached_tokens: int = 0


class TokenDetail(msgspec.Struct, frozen=True, array_like=True):
    """What was asked about one token: its logprob and rank (0 is the most probable), the most probable tokens with theirs.

    Logprobs are of the model's scores before penalties, temperature and filters. `gap` is the distance between the two best
    scores of the draw (see DESIGN: near-ties), in units of their standard deviation; None when it was not asked for.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]
    gap: float | None = None


class PromptDetails(msgspec.Struct, frozen=True, array_like=True):
    """Details of prompt tokens `start` and following of one request. Token 0 has none, so `start` is at least 1."""

    handle: int
    epoch: int
    start: int
    details: list[TokenDetail]


class Cached(msgspec.Struct, frozen=True, array_like=True):
    """So many prompt tokens of a request were found in the prefix cache; at least one."""

    handle: int
    epoch: int
    cached_tokens: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """All tokens of one engine step, as parallel lists, in order of index within each request.

    `details` is parallel to `tokens` when any request of the step asked for some, else empty. `queue_times_s`: how long each
    request that this step started for the first time had waited in the engine; of no particular request, and never on the link.
    `cached` comes with a request's first token in its epoch, for who ends the request before the engine does.
    """

    handles: list[int]
    epochs: list[int]
    indices: list[int]
    tokens: list[int]
    finished: list[Finished]
    details: list[TokenDetail | None] = []
    prompt_details: list[PromptDetails] = []
    queue_times_s: list[float] = []
    cached: list[Cached] = []


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The request does not run here. `status` is the HTTP status for the client, `code` the machine-readable reason."""

    handle: int
    epoch: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class HeavyPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix of many prompts: the key of its last page, its pages, and its share of the prompt tokens that came lately."""

    key: bytes
    pages: int
    token_share: float


class PageChanges(msgspec.Struct, frozen=True, array_like=True, tag="page_changes"):
    """What the prefix cache finds now and did not before, and the reverse, in order: (is_added, key) each.

    `first` is the number of the first change; an incarnation begins at 0 with no pages. With `is_snapshot` the list is all that
    is found, just before change `first`. A leader sends none before `SendPages`; a receiver asks when a number is not the next.
    """

    first: int
    changes: list[tuple[bool, bytes]]
    is_snapshot: bool = False


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Send a snapshot of the page keys, then changes from there on."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """What the engine has in hand. `outstanding_tokens` counts prompt tokens not yet computed and output tokens still allowed.

    Since the engine's start: preemptions; prompt tokens of requests that began, and those of them found in the prefix cache;
    pages taken out of the cache again, and pages evicted; pages or rows that were not accounted for when idle. `step_model`: the
    coefficients of `cost.StepModel` in its order, empty until known.
    """

    waiting: int
    running: int
    outstanding_tokens: int
    free_pages: int
    total_pages: int
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    pages_reused: int = 0
    pages_evicted: int = 0
    leaks: int = 0
    step_model: list[float] = []
    sequence: int = 0
    """Number of the report since the incarnation began, from 1. One that is sent again keeps its own."""
    last_handle: int = 0
    """The highest handle of a Submit that the engine had taken in at this report, in the receiver's own handles; 0: none."""
    reserved_pages: int = 0
    """Of the pages that are not free, those that moves will fill."""
    waiting_prompt_tokens: int = 0
    running_prompt_tokens: int = 0
    """Prompt tokens not yet computed, of requests that wait and of those that run; what the cache holds is not counted."""
    waiting_pages: int = 0
    """Pages that the requests that wait will need."""
    context_tokens: int = 0
    """Tokens in the pages of running requests."""
    oldest_wait_s: float = 0.0
    step_s: float = 0.0
    longest_step_s: float = 0.0
    """Time of a step: followed over about twenty of them, and the longest since the last report."""
    prompt_tokens_per_step: float = 0.0
    """Prompt tokens in a step, followed the same way."""
    refusals: int = 0
    recomputed_tokens: int = 0
    """Since the start: requests refused because the queue was full, and tokens computed again after preemptions."""
    steps_to_full: float | None = None
    """After how many steps no page is free if all go on; None when nothing runs."""
    prefixes: list[HeavyPrefix] = []
    mean_output_tokens: float = 0.0
    """Output tokens that requests had lately."""
    max_num_batched_tokens: int = 0
    """Tokens that a step may hold."""
    cached_pages: int = 0
    """Of the free pages, those that the prefix cache finds."""
    max_num_seqs: int = 0
    """Requests that a step may hold; 0: not told."""
    refused_copies: int = 0
    """Connections that were turned away at the ports where ranks take pages in, since the start."""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What an incarnation computes with: known once its ranks have loaded."""

    model_hash: str = ""
    """Weights, dtype, quantisation and tokenizer: a stream goes on only where it is equal. The `model` of `root_key`."""
    layout: str = ""
    """What pages look like in memory (ranks, stages, dtype, page size): pages go only where it is equal."""
    page_bytes: int = 0
    """Bytes of a page, all ranks together; 0: not told."""


class State(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Whether the group serves. When `incarnation` changes, every request that ran in the former one is lost, and all pages.

    A group that does not serve has lost its requests too, unless it is `draining`: then it takes no more, and finishes those.
    `served` is told by a group that serves or drains; None before its first incarnation has loaded.
    """

    serving: bool
    incarnation: int
    reason: str = ""
    draining: bool = False
    served: Served | None = None
    cause: Cause = ""


class Assets(msgspec.Struct, frozen=True, array_like=True, tag="assets"):
    """What a door needs of a model: files by name (tokenizer, chat template, generation config) and limits.

    `content_hash` is `make_assets` of the rest, so a door may keep it for ever.
    """

    content_hash: str
    files: dict[str, bytes]
    served_names: list[str]
    max_model_len: int
    eos_token_ids: list[int]
    vocab_size: int | None = None
    """Rows of the embedding: a tokenizer may know ids that the model does not. None: not told."""


ToLeader = (
    Hello | Submit | Abort | Fetch | SendPages | Adopt | Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
)
FromLeader = (
    Welcome
    | Tokens
    | Refused
    | Load
    | State
    | Assets
    | PageChanges
    | Adopted
    | moves.Prepared
    | moves.Frozen
    | moves.Arrived
    | moves.MoveFailed
    | moves.AskRescue
)
ToEngine = Submit | Abort | Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
FromEngine = (
    Tokens | Refused | Load | PageChanges | moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed | moves.AskRescue
)

encode = msgspec.msgpack.Encoder().encode
"""Bytes of any frame."""
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
"""A frame that a router sent. Raises msgspec.DecodeError."""
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode
"""A frame that a leader sent. Raises msgspec.DecodeError."""
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
"""A frame for the engine. Raises msgspec.DecodeError."""
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
"""A frame from the engine. Raises msgspec.DecodeError."""


def make_assets(
    files: dict[str, bytes],
    served_names: list[str],
    max_model_len: int,
    eos_token_ids: list[int],
    vocab_size: int | None = None,
) -> Assets:
    """Assets with their content hash: SHA-256 over files sorted by name, names and limits."""
    hasher = hashlib.sha256()
    for name in sorted(files):
        hasher.update(encode([name, files[name]]))
    hasher.update(encode([served_names, max_model_len, eos_token_ids, vocab_size]))
    return Assets(hasher.hexdigest(), files, served_names, max_model_len, eos_token_ids, vocab_size)
