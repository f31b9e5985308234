"""The tables: one for each workload, and the relations that are to hold."""

import math
import statistics
from collections.abc import Mapping, Sequence

from bench.simulate.figures import Figures

Cells = Mapping[str, Sequence[Figures]]
"""By policy: the figures of each seed."""
COLUMNS = (
    ("goodput %", "goodput", 100.0, 1),
    ("TTFT p50 s", "ttft_p50", 1.0, 2),
    ("p99 s", "ttft_p99", 1.0, 2),
    ("TPOT p99 ms", "tpot_p99", 1e3, 0),
    ("gap p99 s", "gap_p99", 1.0, 2),
    ("preemptions", "preemptions", 1.0, 0),
    ("hits %", "hit_share", 100.0, 1),
    ("moves", "moves", 1.0, 0),
    ("returned", "pingpong", 1.0, 0),
    ("stall p99 ms", "stall_p99", 1e3, 0),
)
T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for a 95 % interval of the mean of so many seeds."""


def mean_of(cells: Cells, policy: str, name: str) -> float:
    """The mean over seeds."""
    return statistics.fmean(getattr(one, name) for one in cells[policy])


def table(workload: str, cells: Cells) -> str:
    """One workload as markdown: mean over seeds, and half of the 95 % interval where there are several."""
    lines = [f"| {workload} | " + " | ".join(title for title, *_ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for policy, figures in cells.items():
        row = [_shown([getattr(one, name) * times for one in figures], digits) for _, name, times, digits in COLUMNS]
        lines.append(f"| {policy} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; 0 for a number of values that has none."""
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) in T_95 else 0.0
    return statistics.fmean(values), half


def _shown(values: Sequence[float], digits: int) -> str:
    mean, half = interval_of(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) in T_95 else f"{mean:.{digits}f}"


def relations(all_cells: Mapping[str, Cells]) -> list[tuple[str, float, float, bool]]:
    """What is to hold, with the two numbers and whether it does: (sentence, ours, bound, holds)."""
    found: list[tuple[str, float, float, bool]] = []

    def at_least(text: str, ours: float, bound: float) -> None:
        found.append((f"{text}, at least", ours, bound, ours >= bound))

    def at_most(text: str, ours: float, bound: float) -> None:
        found.append((f"{text}, at most", ours, bound, ours <= bound))

    if "A" in all_cells:
        a = all_cells["A"]
        at_least("A: goodput against Llumnix", mean_of(a, "phalanx", "goodput"), mean_of(a, "Llumnix", "goodput"))
        at_most("A: TTFT p99 against LMetric", mean_of(a, "phalanx", "ttft_p99"), mean_of(a, "LMetric", "ttft_p99"))
    for name in ("B", "D"):
        if name in all_cells:
            cells = all_cells[name]
            peers = [policy for policy in cells if not policy.startswith("phalanx")]
            best = max(mean_of(cells, policy, "goodput") for policy in peers)
            at_least(f"{name}: goodput against the best", mean_of(cells, "phalanx", "goodput"), best)
            least = min(mean_of(cells, policy, "ttft_p99") for policy in peers)
            at_most(f"{name}: TTFT p99 against the best", mean_of(cells, "phalanx", "ttft_p99"), least)
    if "C" in all_cells:
        c = all_cells["C"]
        for text, name in (("preemptions", "preemptions"), ("gap p99", "gap_p99"), ("TTFT p99", "ttft_p99")):
            at_most(f"C: {text} against no moves", mean_of(c, "phalanx", name), mean_of(c, "phalanx, no moves", name))
        moves, returned = mean_of(c, "phalanx", "moves"), mean_of(c, "phalanx", "pingpong")
        at_most("C: moves that returned within 10 s, share", returned / max(1.0, moves), 0.001)
    if "E" in all_cells:
        e = all_cells["E"]
        fresh = mean_of(e, "phalanx, reports 0.05 s", "goodput")
        at_least("E: goodput with reports of 1 s", mean_of(e, "phalanx, reports 1 s", "goodput"), fresh - 0.005)
    return found
