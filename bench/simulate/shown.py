"""The tables: one for each workload, and the relations that are to hold."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
SCALING = (("group-seconds", "group_s", 1.0, 0), ("changes", "changes", 1.0, 0), ("longest drain s", "drain", 1.0, 1))
"""Further columns where the number of groups changes."""
T_95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t for a 95 % interval of the mean of so many seeds."""


def mean_of(cells: Cells, policy: str, name: str) -> float:
    """The mean over seeds."""
    return statistics.fmean(getattr(one, name) for one in cells[policy])


def table(workload: str, cells: Cells) -> str:
    """One workload as markdown: mean over seeds, and half of the 95 % interval where there are several."""
    columns = (*COLUMNS, *SCALING) if any(one.changes for each in cells.values() for one in each) else COLUMNS
    lines = [f"| {workload} | " + " | ".join(title for title, *_ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for policy, figures in cells.items():
        row = [_shown([getattr(one, name) * times for one in figures], digits) for _, name, times, digits in columns]
        lines.append(f"| {policy} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval; 0 for a number of values that has none."""
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) in T_95 else 0.0
    return statistics.fmean(values), half


def _shown(values: Sequence[float], digits: int) -> str:
    mean, half = interval_of(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) in T_95 else f"{mean:.{digits}f}"


Relation = tuple[str, float, float, bool]
"""A sentence, ours, the bound, whether it holds."""


def relations(all_cells: Mapping[str, Cells]) -> list[Relation]:
    """What is to hold, with the two numbers and whether it does."""
    rules: dict[str, Callable[[Cells], list[Relation]]] = {
        "A": _of_a,
        "B": partial(_of_best, "B"),
        "C": _of_c,
        "D": partial(_of_best, "D"),
        "E": _of_e,
        "S": _of_s,
    }
    found = [relation for name, cells in all_cells.items() for relation in rules[name](cells)]
    ours = [one for cells in all_cells.values() for policy, each in cells.items() if policy.startswith("phalanx") for one in each]
    moves, returned = sum(one.moves for one in ours), sum(one.pingpong for one in ours)
    return [*found, _at_most(f"of {moves} moves, those that returned within 10 s", returned / max(1, moves), 0.001)]


def _at_least(text: str, ours: float, bound: float) -> Relation:
    return f"{text}, at least", ours, bound, ours >= bound


def _at_most(text: str, ours: float, bound: float) -> Relation:
    return f"{text}, at most", ours, bound, ours <= bound


def _of_a(cells: Cells) -> list[Relation]:
    return [
        _at_least("A: goodput against Llumnix", mean_of(cells, "phalanx", "goodput"), mean_of(cells, "Llumnix", "goodput")),
        _at_most("A: TTFT p99 against LMetric", mean_of(cells, "phalanx", "ttft_p99"), mean_of(cells, "LMetric", "ttft_p99")),
    ]


def _of_best(name: str, cells: Cells) -> list[Relation]:
    peers = [policy for policy in cells if not policy.startswith("phalanx")]
    best = max(mean_of(cells, policy, "goodput") for policy in peers)
    least = min(mean_of(cells, policy, "ttft_p99") for policy in peers)
    return [
        _at_least(f"{name}: goodput against the best", mean_of(cells, "phalanx", "goodput"), best),
        _at_most(f"{name}: TTFT p99 against the best", mean_of(cells, "phalanx", "ttft_p99"), least),
    ]


def _of_c(cells: Cells) -> list[Relation]:
    names = {"preemptions": "preemptions", "gap p99": "gap_p99", "TTFT p99": "ttft_p99"}
    return [
        _at_most(f"C: {text} against no moves", mean_of(cells, "phalanx", name), mean_of(cells, "phalanx, no moves", name))
        for text, name in names.items()
    ]


def _of_e(cells: Cells) -> list[Relation]:
    fresh = mean_of(cells, "phalanx, reports 0.05 s", "goodput")
    return [_at_least("E: goodput with reports of 1 s", mean_of(cells, "phalanx, reports 1 s", "goodput"), fresh - 0.005)]


def _of_s(cells: Cells) -> list[Relation]:
    scaled = next(name for name in cells if " to " in name)
    most, fewer = (name for name in cells if name != scaled)
    goodput = mean_of(cells, scaled, "goodput")
    return [
        _at_least(f"S: goodput against {most}, less a point", goodput, mean_of(cells, most, "goodput") - 0.01),
        _at_most(f"S: group-seconds against {most}", mean_of(cells, scaled, "group_s"), mean_of(cells, most, "group_s")),
        _at_least(f"S: goodput against {fewer}", goodput, mean_of(cells, fewer, "goodput")),
    ]
