"""Figures of timed answers: TTFT, TPOT, ITL, throughput and goodput. Pure.

TTFT: sending to first token. TPOT: mean time per later token of one request. ITL: gap between two events of one request, which
may carry several tokens. Goodput: requests per second whose TTFT and mean ITL are within the objectives.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MS = 1000.0
PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class Answer:
    """The response to one request. Times are seconds of `time.perf_counter`."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    """Why the response is missing or incomplete."""

    textless_arrivals: list[float] = field(default_factory=list)
    """Arrivals of events without text: all events of a response with tokens that never form a character."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.started

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended - self.started

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first, if there is a second."""
        if self.completion_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between events with text."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    def end(self, ended: float) -> None:
        """Completes the record: a stream without text is timed by its other events, and one without tokens has failed."""
        self.ended = ended
        if self.error is None and not self.arrivals:
            self.arrivals = self.textless_arrivals
            if not self.completion_tokens or not self.textless_arrivals:
                self.error = "the stream had no token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Bounds of a good request, in ms; null: none."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def are_met(self, answer: Answer) -> bool:
        """Returns whether a complete answer is good."""
        gaps = answer.gaps_s
        is_prompt = self.ttft_ms is None or answer.ttft_s * MS <= self.ttft_ms
        return is_prompt and (self.itl_ms is None or not gaps or statistics.fmean(gaps) * MS <= self.itl_ms)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the interpolated percentile; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns mean and percentiles; NaN without values."""
    mean = statistics.fmean(values) if values else math.nan
    return {"mean": mean} | {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


def samples_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Returns the times of the complete answers, by the name of their figure."""
    completed = [answer for answer in answers if answer.error is None]
    return {
        "ttft_ms": [answer.ttft_s * MS for answer in completed],
        "tpot_ms": [tpot * MS for answer in completed if (tpot := answer.tpot_s) is not None],
        "itl_ms": [gap * MS for answer in completed for gap in answer.gaps_s],
        "e2e_ms": [answer.e2e_s * MS for answer in completed],
    }


def measure(answers: Sequence[Answer], duration_s: float) -> dict[str, object]:
    """Returns the figures of a run; failed requests count only as failed."""
    completed = [answer for answer in answers if answer.error is None]
    output_tokens = sum(answer.completion_tokens for answer in completed)
    return {
        "duration_s": duration_s,
        "num_requests": len(answers),
        "num_failed": len(answers) - len(completed),
        "errors": sorted({answer.error for answer in answers if answer.error is not None}),
        "prompt_tokens": sum(answer.prompt_tokens for answer in completed),
        "output_tokens": output_tokens,
        "requests_per_s": len(completed) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        **{name: summary(times) for name, times in samples_ms(answers).items()},
    }


def goodput(answers: Sequence[Answer], duration_s: float, objectives: Objectives) -> float:
    """Returns the good requests per second."""
    return sum(answer.error is None and objectives.are_met(answer) for answer in answers) / duration_s


def format_figures(figures: dict[str, object]) -> str:
    """Returns a table of totals and one of latencies."""
    totals = [
        [name.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"]
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    spread = [
        [name.replace("_", " "), *(f"{value:,.2f}" for value in values.values())]
        for name, values in figures.items()
        if isinstance(values, dict)
    ]
    return table(["total", ""], totals) + "\n\n" + table(["latency", "mean", "p50", "p90", "p99"], spread)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
