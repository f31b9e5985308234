"""Draws an SVG for each workload: a bar for each policy and figure, with the 95 % interval of the mean over seeds."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.simulate.tables import COLUMNS, Cells, interval_of

PANELS = ("goodput", "ttft_p99", "tpot_p99", "gap_p99", "preemptions")
ROW, LABEL, WIDTH, GAP, TOP = 18, 190, 190, 70, 34
OURS, PEER, INK = "#1f6f8b", "#b9c4cc", "#222"


def write_plots(folder: Path, workload: str, cells: Cells) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{workload}.svg"
    path.write_text(chart(workload, cells))
    return path


def chart(workload: str, cells: Cells) -> str:
    height = TOP + ROW * len(cells) + 10
    width = LABEL + len(PANELS) * (WIDTH + GAP)
    shapes = [_text(4, 20, f"load {workload}", bold=True)]
    shapes += [_text(LABEL - 8, TOP + ROW * row + 13, policy, anchor="end") for row, policy in enumerate(cells)]
    for index, name in enumerate(PANELS):
        shapes += _panel(LABEL + index * (WIDTH + GAP), name, cells)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _panel(left: float, name: str, cells: Cells) -> list[str]:
    title, _, times, digits = next(column for column in COLUMNS if column[1] == name)
    intervals = [interval_of([getattr(seed, name) * times for seed in figures]) for figures in cells.values()]
    highest = max((mean + half for mean, half in intervals), default=0.0) or 1.0
    shapes = [_text(left, 20, title, bold=True)]
    for row, (policy, (mean, half)) in enumerate(zip(cells, intervals, strict=True)):
        top, length = TOP + ROW * row, WIDTH * mean / highest
        shapes.append(_bar(left, top + 2, length, OURS if policy.startswith("phalanx") else PEER))
        if half:
            shapes.append(
                _whisker(left, top + ROW / 2, [WIDTH * max(0.0, mean - half) / highest, WIDTH * (mean + half) / highest])
            )
        shapes.append(_text(left + WIDTH * (mean + half) / highest + 4, top + 13, f"{mean:.{digits}f}"))
    return shapes


def _bar(left: float, top: float, length: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{length:.1f}" height="{ROW - 4}" fill="{colour}"/>'


def _whisker(left: float, middle: float, ends: Sequence[float]) -> str:
    start, end = (left + end for end in ends)
    return f'<path d="M{start:.1f} {middle:.1f}H{end:.1f}" stroke="{INK}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}"{weight}>{escape(text)}</text>'
