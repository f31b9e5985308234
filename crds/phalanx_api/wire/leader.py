"""Frames that a leader sends on the link."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from phalanx_api.cache_curve import NO_CURVE, NO_USE, CacheCurve, CacheUse
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.trace import PrefillTime
from phalanx_api.wire.router import Adapter, FinishReason, Pooling, Request

EndCause = Literal["", "outside", "alone"]
"""Why an incarnation ended. outside: not by a request; alone: with a request that runs alone."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome", kw_only=True):
    """First frame of a leader, the response to `Hello`."""

    protocol_version: int
    group: str
    revision: str
    page_size: int
    assets_hash: str
    can_send_prefixes: bool = False  # reads `moves.SendPrefix`
    can_share: bool = False  # reads `Share`


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag="adopted"):
    """The router owns the stream; the epoch stays."""

    handle: int
    request: Request  # with all tokens so far
    finish: FinishReason | None = None
    is_running: bool = True  # otherwise a Submit continues it


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The request ended; all its tokens were sent."""

    handle: int
    epoch: int
    reason: FinishReason
    cached_tokens: int = 0
    vector: bytes = b""  # of a pooled request: float32, little-endian, not normalised


class TokenDetail(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Logprobs of one token, from the raw logits."""

    logprob: float
    rank: int  # from 0
    top_ids: list[int]
    top_logprobs: list[float]
    gap: float | None = None  # smallest logit change, in standard deviations, that samples another token


class PromptDetails(msgspec.Struct, frozen=True, array_like=True):
    """Details of prompt tokens from `start` on; token 0 has no logprob."""

    handle: int
    epoch: int
    start: int
    details: list[TokenDetail]


class Cached(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens found in the prefix cache; 0 only with `prefill`."""

    handle: int
    epoch: int
    cached_tokens: int
    prefill: PrefillTime | None = None  # of a traced request


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens", kw_only=True):
    """Tokens of one engine step. The first four lists are parallel, in order of index within each request."""

    handles: list[int]
    epochs: list[int]
    indices: list[int]
    tokens: list[int]
    finished: list[Finished]
    details: list[TokenDetail | None] = []  # parallel to `tokens`, or empty
    prompt_details: list[PromptDetails] = []
    queue_times_s: list[float] = []  # of newly started requests; engine socket only
    cached: list[Cached] = []  # with the first token in an epoch


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
    """The request cannot run here."""

    handle: int
    epoch: int
    status: int  # HTTP status for the client
    code: str
    message: str
    retry_after_s: float | None = None


class HotPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prefix of many recent prompts."""

    key: bytes  # of its last page
    pages: int
    token_share: float  # of recent prompt tokens


class PageChanges(msgspec.Struct, frozen=True, array_like=True, tag="page_changes"):
    """Changes of the prefix cache, sent after `SendPages`; a receiver with a gap in the numbers sends it again."""

    first: int  # number of the first change, from 0 per incarnation
    changes: list[tuple[bool, bytes]]  # (is_added, page key)
    is_snapshot: bool = False  # `changes` are all cached pages, and those that only the disk has
    on_disk: list[int] = []  # positions in `changes` of pages that only the disk has; `is_added` is false


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """What the requests of a tenant used; counters since the engine's start."""

    tenant: str  # at most `MAX_TENANT_NAME` characters
    step_s: float  # share of the step times
    prompt_tokens: int  # computed, not found in a cache
    output_tokens: int
    energy_j: float | None = None  # of all devices of the group, while they computed; null: not every device counts it


OTHER_TENANTS = "other"
"""The tenants after the first `MAX_TENANTS` of an engine, together."""
MAX_TENANTS, MAX_TENANT_NAME = 32, 64


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load", kw_only=True):
    """Load report of an engine. New fields are appended, so subjects recur."""

    # Queue and page pool.
    waiting: int
    running: int
    outstanding_tokens: int  # uncomputed prompt tokens and remaining output tokens
    free_pages: int
    total_pages: int

    # Counters since the engine's start.
    preemptions: int = 0
    prefix_queried_tokens: int = 0  # of started requests
    prefix_hit_tokens: int = 0
    pages_reused: int = 0
    pages_evicted: int = 0
    leaks: int = 0  # pages or rows unaccounted for while idle

    step_model: list[float] = []  # `cost.StepModel`; empty until fitted

    # Numbers.
    sequence: int = 0  # of the report, from 1 per incarnation
    last_handle: int = 0  # highest handle received from the recipient

    # Backlog.
    reserved_pages: int = 0  # for moves
    waiting_prompt_tokens: int = 0  # uncomputed and not cached
    running_prompt_tokens: int = 0  # the same
    waiting_pages: int = 0  # needed by waiting requests
    context_tokens: int = 0  # in pages of running requests
    oldest_wait_s: float = 0.0

    # Step timing.
    step_s: float = 0.0  # moving average over about 20 steps
    longest_step_s: float = 0.0  # since the last report
    prompt_tokens_per_step: float = 0.0  # moving average

    # Counters since the engine's start.
    refusals: int = 0  # queue full
    recomputed_tokens: int = 0  # after preemptions

    # Forecast.
    steps_to_full: float | None = None  # until the page pool is exhausted at one token per request, if ever
    prefixes: list[HotPrefix] = []
    mean_output_tokens: float = 0.0  # moving average

    # Limits and others.
    max_num_batched_tokens: int = 0
    cached_pages: int = 0  # free pages in the prefix cache
    max_num_seqs: int = 0  # 0: unknown
    refused_transfers: int = 0  # counter of KV transfer connections
    speculation: SpeculationCounts = SpeculationCounts()
    speedup: float = 1.0  # token rate of decodes, relative to decoding without draft tokens
    prompt_attention: float = 0.0  # sum of contexts of the uncomputed prompt tokens
    wasted_tokens: int = 0  # counter of tokens computed for requests that had ended

    # Use of the devices over the last seconds, 0 to 1; 0 if unknown.
    device_busy: float = 0.0  # share of the time in which rank 0's device computed steps
    bandwidth_utilization: float = 0.0  # of the copy rate, during steps
    flop_utilization: float = 0.0  # of the matmul rate, during steps

    # Prefix cache and pages.
    cache_curve: CacheCurve = NO_CURVE
    evicted_page_s: float = 0.0  # counter of seconds that evicted pages were in the prefix cache
    unused_slots: int = 0  # without a token, in pages of running requests

    # Pages in host memory, and counters since the engine's start.
    host_total_pages: int = 0
    host_cached_pages: int = 0
    host_stored_pages: int = 0
    host_loaded_pages: int = 0
    host_evicted_pages: int = 0
    host_declined_pages: int = 0  # found, but faster to compute than to load
    host_load_page_s: float = 0.0  # measured time to load a page

    # Pages on disk, and counters since the engine's start.
    disk_cached_pages: int = 0
    disk_fetched_pages: int = 0  # read into host memory
    disk_failed_pages: int = 0  # not read by all ranks
    disk_declined_pages: int = 0  # found, but faster to compute than to read
    disk_read_page_s: float = 0.0  # measured time to read a page

    # Size of the host tier, and statistics of pages; counters since the engine's start.
    host_resizes: int = 0  # plans that changed it
    host_moved_pages: int = 0  # because their slots were removed
    host_evicted_page_s: float = 0.0  # seconds that evicted pages were in host memory
    disk_compacted_bytes: int = 0  # written by compaction, over all ranks
    disk_reclaimed_bytes: int = 0  # of removed segments, over all ranks
    cache_use: CacheUse = NO_USE

    # Pages of models with sliding windows.
    max_request_pages: int = 0  # most pages that a request holds; 0: those of all its tokens
    dropped_pages: int = 0  # counter of pages, or parts, that no layer of a running request reads any more
    total_parts: int = 0  # parts of pages for layers with a window; 0: all layers share pages
    free_parts: int = 0
    parts_evicted: int = 0  # counter

    # Copies between device and host memory that delay steps; counters since the engine's start.
    host_wait_s: float = 0.0  # seconds that steps waited for copies
    host_sent_pages: int = 0  # pages that other groups pulled from host memory

    # Parts of pages in host memory.
    host_total_parts: int = 0  # slots
    host_stored_parts: int = 0  # counter of evicted parts that were stored
    host_loaded_parts: int = 0  # counter of parts that prompts loaded

    tenants: list[TenantUse] = []  # that computed something, in the order of their first step
    unix_s: float = 0.0  # Unix time of the report; 0: unknown

    # Parts of pages on disk.
    disk_cached_parts: int = 0
    disk_fetched_parts: int = 0  # counter of parts that were read into host memory
    disk_unwritten_pages: int = 0  # counter of pages and parts that a rank did not write: too many waited, or a write failed


class Served(msgspec.Struct, frozen=True, array_like=True):
    """Model of an incarnation."""

    model_hash: str = ""  # weights, dtype, quantization, tokenizer; equal for moves and replays
    layout: str = ""  # KV layout: ranks, stages, dtypes, page size, heads; equal for KV transfer
    page_bytes: int = 0  # over all ranks; 0: unknown
    version: str = ""  # hub commit or manifest digest, if downloaded
    kv_cache_dtype: str = "auto"  # codes of pages, and the hash of their calibration
    embedding_size: int = 0  # length of the vectors of pooled requests; 0: takes none
    hit_pages: int = 0  # pages before its end whose keys a hit needs, because layers have windows; 0: all
    is_encoder: bool = False  # generates no tokens: attention is bidirectional, and pooled requests are computed in one step
    is_classifier: bool = False  # a decoder that generates no tokens: a classification head takes the place of that for tokens

    @property
    def page_model(self) -> str:
        """The model in page keys: pages of different KV dtypes have different keys."""
        return self.model_hash if self.kv_cache_dtype == "auto" else f"{self.model_hash} {self.kv_cache_dtype}"


class DeviceProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault of a device, or a lasting reduction of its clocks."""

    kind: Literal["fault", "throttled"]
    pod: int  # index in the group
    device: int  # index in the pod
    xid: int = 0  # error number of NVIDIA's driver; 0: another cause
    message: str = ""

    def __str__(self) -> str:
        return f"device {self.device} of pod {self.pod}: {self.message}"


class DevicePower(msgspec.Struct, frozen=True, array_like=True):
    """Power of some devices together, in tens of watts; 0 unless all of them report it."""

    mean_w: float = 0.0  # of the last minute
    lowest_w: float = 0.0  # reading of the last ten minutes: that of devices that compute nothing, if they ever pause

    def __add__(self, other: "DevicePower") -> "DevicePower":
        if not self.mean_w or not other.mean_w:
            return NO_POWER
        return DevicePower(self.mean_w + other.mean_w, self.lowest_w + other.lowest_w)


NO_POWER = DevicePower()


class RefusedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A declared adapter that a group cannot load."""

    name: str
    why: str
    is_final: bool = True  # the adapter does not fit; otherwise its download or the load failed and is tried again


class AdapterSlots(msgspec.Struct, frozen=True, array_like=True):
    """Declared adapters of a group, apart from those of `Assets.adapters`, which are loaded."""

    num_free: int  # that neither a loaded adapter nor one that is being loaded will have
    loading: list[str] = []  # names
    refused: list[RefusedAdapter] = []


class State(msgspec.Struct, frozen=True, array_like=True, tag="state", kw_only=True):
    """State of a group. Requests are lost with a new `incarnation`, or if it neither serves nor drains."""

    serving: bool
    incarnation: int
    reason: str = ""
    draining: bool = False
    served: Served | None = None  # while it serves or drains
    cause: EndCause = ""
    deaths: int = 0  # failed incarnations of this leader, except by outside causes or the draft model
    death: str = ""  # reason of the last
    devices: list[DeviceProblem] = []  # present problems of all pods
    power: DevicePower = NO_POWER  # of the devices of all pods
    adapters: AdapterSlots | None = None  # null: the group reads no `DeclareAdapters`


class MemoryAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of one rank, measured at load."""

    rank: int
    weights_bytes: int
    activations_bytes: int  # peak of the largest step
    logits_sampler_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    total_bytes: int  # usable by the rank
    graphs_bytes: int = 0  # of captured decode steps
    graphs_s: float = 0.0  # time of their captures
    kernels: int = 0  # variants that were loaded before the first step
    kernels_compiled: int = 0  # those that no cache had
    kernels_s: float = 0.0  # time of both
    host_cache_bytes: int = 0  # host memory for pages
    window_tokens: int = 0  # tokens whose pages a request keeps, of layers with a window; 0: all
    page_groups: str = ""  # why
    kv_pool_tokens: int = 0  # tokens whose keys and values the pool holds, in layers that keep all
    window_pool_bytes: int = 0  # part of kv_pool_bytes for the layers with a window; 0: all layers share pages
    window_pool_tokens: int = 0  # tokens whose keys and values it holds in these layers
    state_bytes: int = 0  # states of requests, of layers that keep one


_encode = msgspec.msgpack.Encoder().encode


EMBEDDING_FILE = "embedding.json"
"""File of `Assets` with an encoded `Embedding`; absent if the model computes no embeddings."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's hidden states become embeddings."""

    size: int
    pooling: Pooling
    is_normalised: bool = True  # to length 1
    obstacle: str = ""  # why the model has no embeddings after all, for the client
    is_encoder: bool = False  # longer inputs lose their last tokens, not their first, and keep the special ones
    reranker: str = "none"  # how scores are made: see `EngineConfig.reranker`


CLASSIFICATION_FILE = "classification.json"
"""File of `Assets` with an encoded `Classification`; absent if the model has no classification head."""

Activation: TypeAlias = Literal["softmax", "sigmoid", "identity"]


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """What the numbers of a classification head mean: those of a pooled request are its logits."""

    labels: list[str]
    activation: Activation  # of classes
    score_activation: Activation = "sigmoid"  # of the score of a pair of texts, with one label
    obstacle: str = ""  # why the head cannot be used after all, for the client


PARSERS_FILE = "parsers.json"
"""File of `Assets` with encoded `ParserNames`; absent if the checkpoint decides."""


class ParserNames(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of a model's answers: a name, `auto` for that of the checkpoint, or `none`."""

    tool_call: str = "auto"
    reasoning: str = "auto"


TEMPLATE_KWARGS_FILE = "template_kwargs.json"
"""File of `Assets` with a JSON object: variables of the chat template that requests do not set; absent without any."""


class Assets(msgspec.Struct, frozen=True, array_like=True, tag="assets", kw_only=True):
    """The part of a model that the API server needs; cached by `content_hash`."""

    content_hash: str
    files: dict[str, bytes]  # tokenizer, chat template, generation config
    served_names: list[str]
    max_model_len: int
    eos_token_ids: list[int]
    vocab_size: int | None = None  # rows of the embedding
    adapters: list[Adapter] = []  # that requests may name


def hash_files(files: Mapping[str, bytes]) -> "hashlib._Hash":
    """Returns the hash object of the files, which `make_assets` copies: they have megabytes."""
    hasher = hashlib.sha256()
    for name in sorted(files):
        hasher.update(_encode([name, files[name]]))
    return hasher


def make_assets(
    files: dict[str, bytes],
    served_names: list[str],
    max_model_len: int,
    eos_token_ids: list[int],
    vocab_size: int | None = None,
    *,
    adapters: Sequence[Adapter] = (),
    files_hash: "hashlib._Hash | None" = None,
) -> Assets:
    """Builds assets with their content hash, a SHA-256. `files_hash`: of `hash_files`, if known."""
    hasher = hash_files(files) if files_hash is None else files_hash.copy()
    hasher.update(_encode([served_names, max_model_len, eos_token_ids, vocab_size, *([adapters] if adapters else [])]))
    return Assets(
        content_hash=hasher.hexdigest(),
        files=files,
        served_names=served_names,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
        adapters=list(adapters),
    )


def with_adapters(assets: Assets, adapters: Sequence[Adapter], files_hash: "hashlib._Hash | None" = None) -> Assets:
    """Returns the assets with these adapters in place of theirs. `files_hash`: as for `make_assets`."""
    return make_assets(
        assets.files,
        assets.served_names,
        assets.max_model_len,
        assets.eos_token_ids,
        assets.vocab_size,
        adapters=adapters,
        files_hash=files_hash,
    )
