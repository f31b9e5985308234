"""Frames of the link that a leader sends, many of them just as its engine told them. Moves: `phalanx_api.moves`."""

import hashlib
from typing import Literal

import msgspec

from phalanx_api.speculation import SpeculationCounts
from phalanx_api.wire.router import FinishReason, Request

Cause = Literal["", "outside", "alone"]
"""Why an incarnation ended: perhaps any request that ran; nothing inside (a pod left); or, of all requests, only one alone."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome", kw_only=True):
    """First frame of a leader, the response to `Hello`."""

    protocol_version: int
    group: str
    revision: str
    page_size: int
    assets_hash: str


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag="adopted"):
    """The stream is yours: the request with all its tokens so far in `delivered`. The epoch stays, for so does the group.

    `finish`: why it has ended, if it has. With `runs` its next tokens follow; else it goes on only where it is submitted again.
    """

    handle: int
    request: Request
    finish: FinishReason | None = None
    runs: bool = True


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The request ended by itself; its last token is in the same frame or an earlier one."""

    handle: int
    epoch: int
    reason: FinishReason
    cached_tokens: int = 0


class TokenDetail(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
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


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens", kw_only=True):
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


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
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


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load", kw_only=True):
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
    """After how many steps of a token for each request no page is free, as they are expected to end; None: they end early
    enough, or nothing runs."""
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
    speculation: SpeculationCounts = SpeculationCounts()
    speedup: float = 1.0
    """By how much tokens of running requests come faster than one in each step without proposals, lately."""
    prompt_attended: float = 0.0
    """Of the prompt tokens not yet computed, waiting or running: the sum of the contexts that they will have."""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What an incarnation computes with: known once its ranks have loaded."""

    model_hash: str = ""
    """Weights, dtype, quantisation and tokenizer: a stream goes on only where it is equal. The `model` of `root_key`."""
    layout: str = ""
    """What pages look like in memory (ranks, stages, dtype, page size): pages go only where it is equal."""
    page_bytes: int = 0
    """Bytes of a page, all ranks together; 0: not told."""
    version: str = ""
    """Of the source that the model was fetched from: commit of a hub, digest of a manifest; empty: not told, or not fetched."""


class State(msgspec.Struct, frozen=True, array_like=True, tag="state", kw_only=True):
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
    deaths: int = 0
    """Incarnations of this leader that ended, or never came to serve, for no cause outside of the group nor by what drafts."""
    death: str = ""
    """Why the last of them did."""


# Where the memory of a rank's device goes, as measured at load: told by each rank, shown by /v1/metrics.


class MemoryAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank's device. `total_bytes` is what the rank may use; what the parts leave of it is free.

    Activations and `logits_sampler_bytes` are the peak of a dry run of the largest step. `kv_bytes_per_token` is this rank's.
    """

    rank: int
    weights_bytes: int
    activations_bytes: int
    logits_sampler_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    total_bytes: int


# What a door needs of a model, told once by each leader and kept by the hash of its content.

_encode = msgspec.msgpack.Encoder().encode


class Assets(msgspec.Struct, frozen=True, array_like=True, tag="assets", kw_only=True):
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
        hasher.update(_encode([name, files[name]]))
    hasher.update(_encode([served_names, max_model_len, eos_token_ids, vocab_size]))
    return Assets(
        content_hash=hasher.hexdigest(),
        files=files,
        served_names=served_names,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
    )
