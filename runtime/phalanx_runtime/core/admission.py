"""Admission: length and queue are checked on arrival, rows and pages at each step.

    starts if   free_rows > 0  and  free_pages >= pages(context) + running

Each running request keeps a page to grow, so an admission forces no immediate preemption. Output is not reserved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from phalanx_api import wire
from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.core.page_window import PageWindow, max_request_tokens
from phalanx_runtime.core.step_plan import PoolShape

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of Retry-After when the queue is full; the estimate may be far off."""
EXTRA_LOGITS_ROWS = 32
"""Logits rows of a step for draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the engine."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 1024
    """Maximum queued requests."""
    long_prefill_tokens: int = 0
    """Maximum tokens of a prompt per step; 0: half of the prefill budget while prompts compete."""
    itl_target_s: float | None = None
    """Target time of a step with decodes; without it prefill fills each step."""
    plans_in_flight: int = 1
    """Maximum plans in flight with disjoint requests: the pipeline stages."""
    async_scheduling: bool = False
    """One more plan in flight, which continues requests of the previous one."""
    max_waiting_tokens: int | None = None
    """Maximum `Scheduler.backlog_tokens`."""
    is_encoder: bool = False
    """Each prompt is computed in one step, and no request generates tokens."""
    is_classifier: bool = False
    """No request generates tokens."""
    pool: PoolShape | None = None
    """Set by `within`."""

    @staticmethod
    def of(config: EngineConfig, max_model_len: int, is_encoder: bool = False, *, is_classifier: bool = False) -> "Limits":
        """Returns the limits that `config` sets. `max_model_len`: after the page pool has its size."""
        return Limits(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, max_model_len if is_encoder else 0),
            is_encoder=is_encoder,
            is_classifier=is_classifier,
            max_waiting=config.max_num_queued_reqs,
            max_waiting_tokens=config.max_num_queued_tokens,
            long_prefill_tokens=config.long_prefill_token_threshold,
            # Drafts need known tokens: the requests would split into two batches that take turns.
            async_scheduling=config.async_scheduling and config.speculative_method == "none",
            itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1e3,
        )

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "plans_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "or a step could not hold one token of each running request"
            )

    @property
    def max_flights(self) -> int:
        """Maximum plans in flight. Pipeline stages are filled by other requests, without asynchronous scheduling."""
        return 2 if self.runs_ahead else self.plans_in_flight

    @property
    def runs_ahead(self) -> bool:
        """Whether a plan may continue the requests of a plan in flight."""
        return self.async_scheduling and self.plans_in_flight == 1

    @property
    def max_new_tokens(self) -> int:
        """Maximum tokens of one request in all plans in flight."""
        return self.max_num_batched_tokens * (2 if self.runs_ahead else 1)

    @property
    def max_logits_rows(self) -> int:
        """Maximum logits rows per step; sizes the logits buffer."""
        return self.max_num_seqs + EXTRA_LOGITS_ROWS

    def within(self, pool: PoolShape) -> "Limits":
        """Reduces `max_model_len` to the tokens of the longest request that fits the pool, which `check_images` needs too."""
        longest = max_request_tokens(pool.num_pages, pool.page_size, pool.window, pool.num_parts)
        return replace(self, max_model_len=min(self.max_model_len, longest), pool=pool)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rejection of a request."""

    status: int

    code: str
    message: str
    backlog_tokens: int | None = None
    """Tokens to compute before a retry can succeed, if one can."""


STATE_LOST = Refusal(503, "state_lost", "the group has lost the state of this request: send it again")
"""A router sends it to another group."""


def check_length(num_prompt: int, limits: Limits, is_pooled: bool = False) -> Refusal | None:
    """Returns a refusal if the prompt is empty or leaves no room for an output token, which a pooled request does not have.

    The API server checks first (`openai.sampling.max_output_tokens`).
    """
    if (limits.is_encoder or limits.is_classifier) and not is_pooled:
        kind = "an encoder" if limits.is_encoder else "a classifier"
        why = f"this model is {kind}, which generates no tokens; use /v1/embeddings, /v1/classify, /v1/score or /v1/rerank"
        return Refusal(400, "no_generation", why)
    if num_prompt == 0:
        return Refusal(400, "empty_prompt", "the prompt has no tokens; at least one is needed")
    if is_pooled and num_prompt > limits.max_model_len:
        why = f"the input has {num_prompt} tokens; the limit is {limits.max_model_len}"
        return Refusal(400, "context_length_exceeded", why)
    if not is_pooled and num_prompt >= limits.max_model_len:
        return Refusal(
            400,
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens; with one output token the limit is {limits.max_model_len}",
        )
    return None


def check_queue(num_waiting: int, backlog_tokens: int, limits: Limits) -> Refusal | None:
    """Returns a refusal if the queue is full. An empty queue accepts any length."""
    if num_waiting >= limits.max_waiting:
        return Refusal(429, "queue_full", f"{num_waiting} requests wait already", backlog_tokens)
    if num_waiting and limits.max_waiting_tokens is not None and backlog_tokens >= limits.max_waiting_tokens:
        return Refusal(429, "queue_full", f"requests with {backlog_tokens} tokens to compute wait already", backlog_tokens)
    return None


def check_images(images: Sequence[wire.Image], limits: Limits, num_prompt: int | None = None) -> Refusal | None:
    """Returns a refusal if a step with decodes and drafts of other requests may lack room for an image that it must compute.

    Or if an image is not all in the `num_prompt` tokens of a prompt: no chunk could end with it. Or if it needs more pages with a
    window than the pool has.
    """
    if num_prompt is not None and any(image.stop > num_prompt for image in images):
        return Refusal(400, "no_images", f"an image ends after the {num_prompt} tokens of the prompt")
    whole = wire.whole_tokens(images)
    needed = whole + limits.max_num_seqs + EXTRA_LOGITS_ROWS
    if whole and needed > limits.max_num_batched_tokens:
        why = f"one step computes the {whole} tokens of an image: --max-num-batched-tokens must be at least {needed}"
        return Refusal(400, "no_images", f"{why}, or --max-num-seqs lower")
    return None if limits.pool is None else _check_image_pages(images, limits.pool)


def _check_image_pages(images: Sequence[wire.Image], pool: PoolShape) -> Refusal | None:
    """Returns a refusal if the pool lacks pages for the window before an image and all its tokens, which one step computes."""
    if not pool.window:
        return None
    window, size, num_pages = PageWindow(pool.window, pool.page_size), pool.page_size, pool.num_parts or pool.num_pages
    for first, count in (span for image in images if image.attends_within for span in image.spans):
        start = first // size * size if pool.num_parts else first  # a request drops parts up to the start of its page
        needed = -(-(first + count) // size) - window.first_page(start)
        if needed > num_pages:
            why = f"one step computes the {count} tokens of an image after token {first}, and needs {needed} pages with a window"
            return Refusal(400, "no_images", f"{why}; the pool has {num_pages}")
    return None


def can_start(context_pages: int, free_pages: int, free_rows: int, num_running: int) -> bool:
    """Returns whether a waiting request may start."""
    return free_rows > 0 and free_pages >= context_pages + num_running


def refused_frame(handle: int, epoch: int, refuse: Refusal, tokens_per_s: float) -> wire.Refused:
    """Returns the frame of a refusal. tokens_per_s: at which a backlog shrinks, 0 if it is not known."""
    retry_after_s = None
    if refuse.backlog_tokens is not None:
        backlog_s = refuse.backlog_tokens / tokens_per_s if tokens_per_s else MIN_RETRY_S
        retry_after_s = min(max(backlog_s, MIN_RETRY_S), MAX_RETRY_S)
    return wire.Refused(
        handle=handle,
        epoch=epoch,
        status=refuse.status,
        code=refuse.code,
        message=refuse.message,
        retry_after_s=retry_after_s,
    )


def unreadable(message: bytes) -> wire.Refused:
    """Returns the refusal of an undecodable request.

    Raises DecodeError, which ends the incarnation, if the handle cannot be decoded either.
    """
    try:
        _, handle, request = msgspec.msgpack.decode(message, type=tuple[str, int, list[object]])
    except msgspec.MsgspecError as error:
        raise msgspec.DecodeError(f"frame for the engine names no request: {error}") from error
    epoch = request[1] if len(request) > 1 and isinstance(request[1], int) else 0
    return wire.Refused(
        handle=handle, epoch=epoch, status=500, code="unreadable_request", message="the engine cannot read this request"
    )
