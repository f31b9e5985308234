"""Tables of the simulator: one per workload, and the relations."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.frame.figures import Verdict, half_interval, markdown_header, markdown_row
from bench.simulate.figures import Figures

Cells = Mapping[str, Sequence[Figures]]
"""Figures by policy, one for each seed."""
COLUMNS = (
    ("goodput %", "goodput", 100.0, 1),
    ("TTFT p50 s", "ttft_p50", 1.0, 2),
    ("p99 s", "ttft_p99", 1.0, 2),
    ("TPOT p99 ms", "tpot_p99", 1e3, 0),
    ("gap p99 s", "gap_p99", 1.0, 2),
    ("preemptions", "preemptions", 1.0, 0),
    ("hits %", "hit_share", 100.0, 1),
    ("moves", "moves", 1.0, 0),
    ("returned", "returned", 1.0, 0),
    ("stall p99 ms", "stall_p99", 1e3, 0),
)
SCALING = (("group-seconds", "group_s", 1.0, 0), ("changes", "changes", 1.0, 0), ("longest drain s", "drain", 1.0, 1))
"""Further columns for a changing number of groups."""


def mean_of(cells: Cells, policy: str, name: str) -> float:
    return statistics.fmean(getattr(seed, name) for seed in cells[policy])


def to_markdown(workload: str, cells: Cells) -> str:
    """Returns the Markdown table of one workload: means over seeds ± half of the 95 % interval."""
    columns = (*COLUMNS, *SCALING) if any(seed.changes for seeds in cells.values() for seed in seeds) else COLUMNS
    lines = [markdown_header([workload, *(title for title, *_ in columns)])]
    for policy, figures in cells.items():
        row = [_format([getattr(seed, name) * times for seed in figures], digits) for _, name, times, digits in columns]
        lines.append(markdown_row([policy, *row]))
    return "\n".join(lines)


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), half_interval(values)


def _format(values: Sequence[float], digits: int) -> str:
    mean, half = interval_of(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Relation:
    """A bound on one figure. It fails if means over seeds miss it by more than half of the 95 % interval of the difference."""

    text: str
    ours: float  # mean
    bound: float  # mean
    half: float  # half of the 95 % interval of the difference, seed by seed
    is_least: bool
    """Whether the bound is a minimum, otherwise a maximum."""

    @property
    def holds(self) -> bool:
        return self.ours >= self.bound if self.is_least else self.ours <= self.bound

    @property
    def verdict(self) -> Verdict:
        if self.holds:
            return "yes"
        return "not distinguishable" if abs(self.ours - self.bound) <= self.half else "NO"


Values = Sequence[float]
"""One value per seed."""


def relations(all_cells: Mapping[str, Cells]) -> list[Relation]:
    rules: dict[str, Callable[[Cells], list[Relation]]] = {
        "A": _of_a,
        "B": partial(_of_best, "B"),
        "C": _of_c,
        "D": partial(_of_best, "D"),
        "E": _of_e,
        "S": _of_s,
    }
    found = [relation for name, cells in all_cells.items() for relation in rules[name](cells)]
    ours = [
        seed for cells in all_cells.values() for policy, seeds in cells.items() if policy.startswith("phalanx") for seed in seeds
    ]
    moves, returned = sum(seed.moves for seed in ours), sum(seed.returned for seed in ours)
    return [*found, _at_most(f"of {moves} moves, those that returned within 10 s", [returned / max(1, moves)], [0.001])]


def _at_least(text: str, ours: Values, bound: Values) -> Relation:
    return _relation(f"{text}, at least", ours, bound, is_least=True)


def _at_most(text: str, ours: Values, bound: Values) -> Relation:
    return _relation(f"{text}, at most", ours, bound, is_least=False)


def _relation(text: str, ours: Values, bound: Values, is_least: bool) -> Relation:
    half = half_interval([a - b for a, b in zip(ours, bound, strict=True)])
    return Relation(text, statistics.fmean(ours), statistics.fmean(bound), half, is_least)


def _values(cells: Cells, policy: str, name: str, added: float = 0.0) -> list[float]:
    return [getattr(seed, name) + added for seed in cells[policy]]


def _of_a(cells: Cells) -> list[Relation]:
    found = []
    if cells.keys() >= {"phalanx", "Llumnix"}:
        goodput = (_values(cells, policy, "goodput") for policy in ("phalanx", "Llumnix"))
        found.append(_at_least("A: goodput against Llumnix", *goodput))
    if cells.keys() >= {"phalanx", "LMetric"}:
        ttft = (_values(cells, policy, "ttft_p99") for policy in ("phalanx", "LMetric"))
        found.append(_at_most("A: TTFT p99 against LMetric", *ttft))
    return found


def _of_best(name: str, cells: Cells) -> list[Relation]:
    peers = [policy for policy in cells if not policy.startswith("phalanx")]
    if "phalanx" not in cells or not peers:
        return []
    best = max(peers, key=lambda policy: mean_of(cells, policy, "goodput"))
    first = min(peers, key=lambda policy: mean_of(cells, policy, "ttft_p99"))
    peer = f"the best of {len(peers)}"
    return [
        _at_least(f"{name}: goodput against {peer}", _values(cells, "phalanx", "goodput"), _values(cells, best, "goodput")),
        _at_most(f"{name}: TTFT p99 against {peer}", _values(cells, "phalanx", "ttft_p99"), _values(cells, first, "ttft_p99")),
    ]


def _of_c(cells: Cells) -> list[Relation]:
    ours, unmoved = "phalanx", "phalanx, no moves"
    if not cells.keys() >= {ours, unmoved}:
        return []
    names = {"preemptions": "preemptions", "gap p99": "gap_p99", "TTFT p99": "ttft_p99"}
    return [
        _at_most(f"C: {text} against no moves", _values(cells, ours, name), _values(cells, unmoved, name))
        for text, name in names.items()
    ]


def _of_e(cells: Cells) -> list[Relation]:
    old, fresh = "phalanx, reports 1 s", "phalanx, reports 0.05 s"
    if not cells.keys() >= {old, fresh}:
        return []
    text = "E: goodput with reports of 1 s, against 0.05 s less half a point"
    return [_at_least(text, _values(cells, old, "goodput"), _values(cells, fresh, "goodput", -0.005))]


def _of_s(cells: Cells) -> list[Relation]:
    scaled = next((name for name in cells if " to " in name), None)
    fixed = [name for name in cells if name != scaled]
    if scaled is None or len(fixed) != 2:
        return []
    full, fewer = fixed
    goodput, group_s = _values(cells, scaled, "goodput"), _values(cells, scaled, "group_s")
    return [
        _at_least(f"S: goodput against {full}, less a point", goodput, _values(cells, full, "goodput", -0.01)),
        _at_most(f"S: group-seconds against {full}", group_s, _values(cells, full, "group_s")),
        _at_least(f"S: goodput against {fewer}", goodput, _values(cells, fewer, "goodput")),
    ]
