"""Bounds of `bench.gpu` and verdicts, as pure functions of figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["", "yes", "NO", "limited"]

DECODE_SHARES: Mapping[int, float] = {1: 0.86, 64: 0.83, 256: 0.83}
"""Of the time in which weights and KV cache are copied once, by batch size. Llama-3.1-8B's shape, context 512."""
PREFILL_SHARE = 0.80
"""Of the measured matmul rate, for a prompt of 2,048 tokens."""
SMALL_TOKENS_PER_S, SMALL_COPY_BYTES_PER_S = 2200.0, 4.3e12
"""Qwen3-0.6B's shape at batch 1, and the copy rate of the device (H200) that the bound is for."""
MAX_GAP_US = 20.0
MIN_BUSY = 0.95
MAX_P99_MS = 100.0
SATURATED = 0.9
"""CPU seconds per second from which a program is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str = ""
    """"share" for values of 0 to 1."""
    bound: float | None = None
    is_least: bool = True
    """Whether the bound is the least value; else the largest."""
    predicted: float | None = None
    """With the measured rates: by `bench.gpu.roofline` for decode and prefill, from bytes or FLOPs for a kernel alone."""
    limit: str = ""
    """What limits the value, if the measurement names it: the missed bound is then explained."""

    @property
    def verdict(self) -> Verdict:
        """Whether the bound holds; empty without one; `limited` if it is missed and `limit` is set. NaN misses every bound."""
        if self.bound is None:
            return ""
        if self.value >= self.bound if self.is_least else self.value <= self.bound:
            return "yes"
        return "limited" if self.limit else "NO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one part measured."""

    part: str
    figures: Sequence[Figure] = ()
    seconds: float = 0.0
    skipped: str = ""
    """Why the part lacked time, before its start or while it ran."""
    failed: str = ""
    """The error that ended the part."""

    @property
    def is_good(self) -> bool:
        """Whether the part did not fail and no verdict is NO."""
        return not self.failed and all(figure.verdict != "NO" for figure in self.figures)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Returns 1 if a part failed or a bound was missed with the verdict NO, else 3 if a part was skipped: its bounds are unknown.

    Limited figures do not count.
    """
    if not all(outcome.is_good for outcome in outcomes):
        return 1
    return 3 if any(outcome.skipped for outcome in outcomes) else 0


def small_bound(copy_bytes_per_s: float) -> float:
    """Returns the bound of the small model in tokens/s, in proportion to the measured copy rate."""
    return SMALL_TOKENS_PER_S * copy_bytes_per_s / SMALL_COPY_BYTES_PER_S


def skip_reason(spent_s: float, needed_s: float, budget_s: float) -> str:
    """Returns why a part that takes about `needed_s` does not start; empty if it fits the budget."""
    if spent_s + needed_s <= budget_s:
        return ""
    return f"{spent_s:.0f} s of {budget_s:.0f} s are spent, and it takes about {needed_s:.0f} s"


def limit_of(cpu_shares: Mapping[str, float]) -> str:
    """Returns the busiest program that uses its whole core, if any. `cpu_shares`: CPU seconds per second by program.

    Never a rank: it waits for its device in a loop, so its CPU time explains no missed bound.
    """
    busy = {name: share for name, share in cpu_shares.items() if share >= SATURATED and not name.startswith("rank")}
    if not busy:
        return ""
    name = max(busy, key=lambda one: busy[one])
    return f"{name}: {busy[name]:.2f} CPU s/s"
