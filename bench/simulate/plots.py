"""The tables as pictures: an SVG for each workload, a bar for each policy, with the 95 % interval of the mean over seeds."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench.simulate.shown import COLUMNS, Cells, interval_of

PANELS = ("goodput", "ttft_p99", "tpot_p99", "gap_p99", "preemptions")
ROW, LABEL, WIDTH, GAP, TOP = 18, 190, 190, 70, 34
OURS, PEER, INK = "#1f6f8b", "#b9c4cc", "#222"


def write_plots(folder: Path, workload: str, cells: Cells) -> Path:
    """The file of one workload's picture, in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{workload}.svg"
    path.write_text(picture(workload, cells))
    return path


def picture(workload: str, cells: Cells) -> str:
    """One workload as SVG: a panel for each figure, in which the policies stand below one another."""
    height = TOP + ROW * len(cells) + 10
    width = LABEL + len(PANELS) * (WIDTH + GAP)
    shapes = [_text(4, 20, f"load {workload}", bold=True)]
    shapes += [_text(LABEL - 8, TOP + ROW * row + 13, policy, anchor="end") for row, policy in enumerate(cells)]
    for place, name in enumerate(PANELS):
        shapes += _panel(LABEL + place * (WIDTH + GAP), name, cells)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _panel(left: float, name: str, cells: Cells) -> list[str]:
    """The bars of one figure, all on one scale from zero."""
    title, _, times, digits = next(column for column in COLUMNS if column[1] == name)
    told = [interval_of([getattr(one, name) * times for one in figures]) for figures in cells.values()]
    most = max((mean + half for mean, half in told), default=0.0) or 1.0
    shapes = [_text(left, 20, title, bold=True)]
    for row, (policy, (mean, half)) in enumerate(zip(cells, told, strict=True)):
        top, length = TOP + ROW * row, WIDTH * mean / most
        shapes.append(_bar(left, top + 2, length, OURS if policy.startswith("phalanx") else PEER))
        if half:
            shapes.append(_whisker(left, top + ROW / 2, [WIDTH * max(0.0, mean - half) / most, WIDTH * (mean + half) / most]))
        shapes.append(_text(left + WIDTH * (mean + half) / most + 4, top + 13, f"{mean:.{digits}f}"))
    return shapes


def _bar(left: float, top: float, length: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{length:.1f}" height="{ROW - 4}" fill="{colour}"/>'


def _whisker(left: float, middle: float, ends: Sequence[float]) -> str:
    start, end = (left + at for at in ends)
    return f'<path d="M{start:.1f} {middle:.1f}H{end:.1f}" stroke="{INK}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}"{weight}>{escape(words)}</text>'
