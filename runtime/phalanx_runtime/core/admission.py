"""Who may come in: at the door (never fits, queue full) and at each step (a row and pages for the whole context are free).

    fits ever: prompt < max_model_len, and max_model_len never exceeds the pool (see `Limits.within`)
    fits now:  free_rows > 0  and  free_pages >= pages(context) + running

The last term leaves every running request one page to grow into, so that an admission does not force a preemption in the
next steps. Alone, a request that fits ever fits now: progress. The length of the output is not reserved.
"""

from dataclasses import dataclass, replace

from phalanx_runtime.core.step_plan import PoolShape

MORE_DRAWS = 32
"""Rows of scores that a step may have beyond one for each request that it may hold: for what is proposed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine takes on. Tokens of one request, requests in one step, tokens in one step, requests that wait.

    `long_prefill_tokens`: most tokens of one prompt in a step; 0 takes half of what prompts get while others have some, and all
    otherwise. `itl_target_s`: how long a stream should wait between tokens at most; None gives prompts all that fits.
    `plans_in_flight`: how many plans may be made before the first of them is committed. `max_waiting_tokens`: bound of the
    queue in tokens to be computed (see `Scheduler.backlog_tokens`), beside the one in requests; None is none.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 1024
    long_prefill_tokens: int = 0
    itl_target_s: float | None = None
    plans_in_flight: int = 1
    max_waiting_tokens: int | None = None

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
        """Rows of scores that a step has at most: one for each request and for some proposals. Memory is kept for so many."""
        return self.max_num_seqs + MORE_DRAWS

    def within(self, pool: PoolShape) -> "Limits":
        """These limits with max_model_len cut to what the whole pool holds, so that one request alone always fits."""
        return replace(self, max_model_len=min(self.max_model_len, pool.num_pages * pool.page_size))


@dataclass(frozen=True, slots=True)
class Admit:
    """The request comes in now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The request fits, but not now."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request does not run here: HTTP status and code for the client, and how many tokens stand before a later try."""

    status: int
    code: str
    message: str
    backlog_tokens: int | None = None


def fits_ever(num_prompt: int, limits: Limits) -> Admit | Refuse:
    """Whether an empty engine could serve this prompt. The door checks lengths too; a router may know less than we do."""
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
    """Whether one more request may join the queue. One may always wait in an empty queue, however long it is."""
    if waiting >= limits.max_waiting:
        return Refuse(429, "queue_full", f"{waiting} requests wait already", backlog_tokens)
    if waiting and limits.max_waiting_tokens is not None and backlog_tokens >= limits.max_waiting_tokens:
        return Refuse(429, "queue_full", f"requests with {backlog_tokens} tokens to compute wait already", backlog_tokens)
    return Wait()


def fits_now(context_pages: int, free_pages: int, free_rows: int, running: int) -> Admit | Wait:
    """Whether the first of the queue may start in this step."""
    if free_rows and free_pages >= context_pages + running:
        return Admit()
    return Wait()
