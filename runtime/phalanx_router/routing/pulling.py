"""Decides whether the group of a request copies cached pages of its prompt from another group, the holder.

    compute_s  = prompt_s(n, cached at the target) - prompt_s(n, cached at the holder)
    copy_s     = overhead + bytes of the missing pages / rate + pages that only the holder's disk has * time to read one
    pull  iff  MARGIN * copy_s < compute_s

A target that would read pages from its own disk instead does so at the time that this takes, if that is less than `compute_s`.
Rate and overhead are measured by pulls. A pull that takes `compute_s` is given up: a request then waits at most twice as long as
without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx_router.routing.view import UNKNOWN, GroupView

MIN_PULL_TOKENS = 256
MARGIN = 1.5
MIN_TIMEOUT_S = 0.25
OVERHEAD_S = 0.02
"""Until a pull has measured it: the reservation and two round trips."""
RATE_SMOOTHING = 0.3
REMEMBERED_S = 60.0
"""Age from which a measured rate is forgotten: without pulls nothing would correct it."""

NoPullCode = Literal["short", "no_holder", "unknown", "compute"]


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Speed of pulls."""

    bytes_per_s: float
    overhead_s: float = OVERHEAD_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """A pull that pays. Group keys."""

    holder: str
    target: str
    num_pages: int  # of the prompt, from the first on, those of the target included
    num_tokens: int  # missing at the target
    num_bytes: float
    compute_s: float
    copy_s: float
    read_s: float = 0.0  # part of `copy_s` in which the holder reads pages from disk

    @property
    def timeout_s(self) -> float:
        """Time after which the request is computed instead."""
        return max(MIN_TIMEOUT_S, self.compute_s)

    @property
    def why(self) -> str:
        """The comparison as one sentence."""
        return f"{self.num_tokens} tokens take {self.copy_s:.3f} s to copy and {self.compute_s:.3f} s to compute"


@dataclass(frozen=True, slots=True)
class NoPull:
    """Why a request is computed."""

    code: NoPullCode
    why: str


@dataclass(frozen=True, slots=True)
class KnownPages:
    """Prompt tokens whose pages groups have, by group key."""

    in_memory: Mapping[str, int]
    with_disk: Mapping[str, int] = field(default_factory=dict)
    """In memory or on disk, of groups that have some pages only on disk."""

    def of(self, key: str) -> list[int]:
        """Returns the tokens that a group has in memory, and those with its disk if these are more."""
        in_memory, with_disk = self.in_memory.get(key, 0), self.with_disk.get(key, 0)
        return [in_memory, with_disk] if with_disk > in_memory else [in_memory]

    def read_s(self, view: GroupView, num_tokens: int) -> float:
        """Returns the seconds in which a group reads from disk what its memory lacks of the first `num_tokens`."""
        missing = max(0, num_tokens - self.in_memory.get(view.key, 0))
        return missing // view.capacity.page_size * view.capacity.disk_page_s


def plan_pull(
    target: GroupView, others: Sequence[GroupView], known: KnownPages, prompt_tokens: int, rate: CopyRate
) -> PullPlan | NoPull:
    """Plans a pull to `target` from one of the `others`.

    `prompt_tokens`: with delivered ones; at least the last token is computed.
    """
    page_size = target.capacity.page_size
    own = known.of(target.key)[0]
    limit = (prompt_tokens - 1) // page_size * page_size
    if limit - own < MIN_PULL_TOKENS:
        return NoPull("short", f"{limit - own} tokens of full pages are missing")
    holders = [(view, min(limit, held)) for view in others if _can_send(view, target) for held in known.of(view.key)]
    holders = [(view, held) for view, held in holders if held - own >= MIN_PULL_TOKENS]
    if not holders:
        return NoPull("no_holder", f"no group with the same layout holds {MIN_PULL_TOKENS} tokens more")
    if not target.capacity.page_bytes or target.step_model is UNKNOWN:
        return NoPull("unknown", "the group has reported no page size or step time yet")
    alone_s = min(known.read_s(target, num) + target.prompt_s(prompt_tokens, num) for num in known.of(target.key))

    def plan(view: GroupView, held: int) -> PullPlan:
        num_bytes, read_s = target.kv_bytes(held - own), known.read_s(view, held)
        return PullPlan(
            holder=view.key,
            target=target.key,
            num_pages=held // page_size,
            num_tokens=held - own,
            num_bytes=num_bytes,
            compute_s=alone_s - target.prompt_s(prompt_tokens, held),
            copy_s=rate.overhead_s + num_bytes / max(rate.bytes_per_s, 1.0) + read_s,
            read_s=read_s,
        )

    plans = [(plan(view, held), view.backlog_s) for view, held in holders]
    best, _ = max(plans, key=lambda each: (each[0].compute_s - each[0].copy_s, -each[1], each[0].holder))
    return best if MARGIN * best.copy_s < best.compute_s else NoPull("compute", best.why)


def _can_send(view: GroupView, target: GroupView) -> bool:
    same_pages = (view.page_model, view.layout, view.capacity.page_size) == (
        target.page_model,
        target.layout,
        target.capacity.page_size,
    )
    return view.key != target.key and same_pages and bool(view.layout) and view.state == "fresh"


class PullRates:
    """Speed of recent pulls."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None
        self._overhead_s = OVERHEAD_S
        self._measured_at = 0.0

    def rate(self, copy_bytes_per_s: float, cap: float | None, now: float) -> CopyRate:
        """Rate of the next pull. `copy_bytes_per_s`: of moves, before a pull has measured it; `cap`: of the budget."""
        if self._bytes_per_s is not None and now - self._measured_at > REMEMBERED_S:
            self._bytes_per_s, self._overhead_s = None, OVERHEAD_S
        bytes_per_s = copy_bytes_per_s if self._bytes_per_s is None else self._bytes_per_s
        return CopyRate(bytes_per_s if cap is None else min(cap, bytes_per_s), self._overhead_s)

    def record(self, num_bytes: float, prepare_s: float, copy_s: float, now: float, *, read_s: float = 0.0) -> None:
        """Records a completed pull. `read_s`: expected time to read from disk; a copy that took no longer measures nothing."""
        if copy_s <= read_s:
            return
        measured = num_bytes / max(copy_s - read_s, 1e-4)
        before = measured if self._bytes_per_s is None else self._bytes_per_s
        self._bytes_per_s = before + RATE_SMOOTHING * (measured - before)
        self._overhead_s += RATE_SMOOTHING * (prepare_s - self._overhead_s)
        self._measured_at = now

    def record_timeout(self, plan: PullPlan, copy_s: float, now: float) -> None:
        """Records a pull whose copy was given up after `copy_s`, unless the target took most of the time to prepare."""
        if 2 * copy_s < plan.timeout_s:
            return
        self._bytes_per_s = plan.num_bytes / (2 * copy_s)
        self._measured_at = now
