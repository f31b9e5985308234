"""Admission of requests: on arrival (never fits, queue full) and at each step (a free row, and pages for the whole context).

    fits ever: prompt < max_model_len, and max_model_len never exceeds the pool (see `Limits.within`)
    fits now:  free_rows > 0  and  free_pages >= pages(context) + running

The last term leaves every running request one page to grow, so an admission forces no preemption in the next steps. Without other
requests a request that fits ever fits now, which guarantees progress. Output length is not reserved.
"""

from dataclasses import dataclass, replace

from phalanx_runtime.core.step_plan import PoolShape

MORE_DRAWS = 32
"""Logits rows of a step beyond one per request, for draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the engine."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 1024
    """Requests in the queue."""
    long_prefill_tokens: int = 0
    """Most tokens of one prompt in a step; 0: half of the prefill budget while other prompts need it, else all."""
    itl_target_s: float | None = None
    """Longest step with running streams; without it prompts get all that fits."""
    plans_in_flight: int = 1
    """Plans made before the first of them is committed."""
    max_waiting_tokens: int | None = None
    """Bound of the queue in uncomputed tokens, see `Scheduler.backlog_tokens`."""

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
    def max_draws(self) -> int:
        """Maximum logits rows per step; sizes the logits buffer."""
        return self.max_num_seqs + MORE_DRAWS

    def within(self, pool: PoolShape) -> "Limits":
        """Returns these limits with max_model_len reduced to the whole pool, so that one request alone always fits."""
        return replace(self, max_model_len=min(self.max_model_len, pool.num_pages * pool.page_size))


@dataclass(frozen=True, slots=True)
class Admit:
    """The request starts now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The request fits, but not now."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request is rejected: HTTP status and code, and the tokens queued before a later try."""

    status: int
    code: str
    message: str
    backlog_tokens: int | None = None


def fits_ever(num_prompt: int, limits: Limits) -> Admit | Refuse:
    """Returns whether an empty engine could serve this prompt. The API server checks lengths too, but a router may know less."""
    if num_prompt == 0:
        return Refuse(400, "empty_prompt", "the prompt has no tokens; at least one is needed")
    if num_prompt >= limits.max_model_len:
        return Refuse(
            400,
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens; with one output token the limit is {limits.max_model_len}",
        )
    return Admit()


def may_wait(waiting: int, backlog_tokens: int, limits: Limits) -> Wait | Refuse:
    """Returns whether one more request may join the queue. An empty queue accepts a request of any length."""
    if waiting >= limits.max_waiting:
        return Refuse(429, "queue_full", f"{waiting} requests wait already", backlog_tokens)
    if waiting and limits.max_waiting_tokens is not None and backlog_tokens >= limits.max_waiting_tokens:
        return Refuse(429, "queue_full", f"requests with {backlog_tokens} tokens to compute wait already", backlog_tokens)
    return Wait()


def fits_now(context_pages: int, free_pages: int, free_rows: int, running: int) -> Admit | Wait:
    """Returns whether the first request of the queue may start in this step."""
    if free_rows and free_pages >= context_pages + running:
        return Admit()
    return Wait()
