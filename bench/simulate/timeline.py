"""Draws the time to first token over time as an SVG, a line for each policy."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

Series = Sequence[tuple[float, float]]
"""(arrival, time to first token), in seconds."""
BINS = 60
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 760, 260, 60, 30, 170
COLOURS = ("#222222", "#1f6f8b", "#5aa9c4", "#c45a3b", "#8a6fb0", "#6b8e23", "#b08a2e", "#808080", "#d48fb2")


def chart(found: Mapping[str, Series]) -> str:
    """Returns the chart: the 95th percentile of each of 60 intervals, without those that have no arrival."""
    end_s = max((at_s for points in found.values() for at_s, _ in points), default=0.0) or 1.0
    lines = {name: _percentiles(points, end_s) for name, points in found.items()}
    highest = max((value for line in lines.values() for _, value in line), default=0.0) or 1.0
    shapes = [_text(LEFT, 18, "TTFT P95, ms", is_bold=True), _text(4, TOP + 10, f"{highest * 1e3:.0f}")]
    shapes += [_text(4, TOP + HEIGHT, "0"), _text(LEFT + WIDTH - 40, TOP + HEIGHT + 16, f"{end_s:.0f} s")]
    shapes.append(f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}H{LEFT + WIDTH}" fill="none" stroke="#888"/>')
    for row, (name, line) in enumerate(lines.items()):
        colour = COLOURS[row % len(COLOURS)]
        points = " ".join(f"{LEFT + WIDTH * at_s / end_s:.1f},{TOP + HEIGHT * (1 - value / highest):.1f}" for at_s, value in line)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{2 if row < 2 else 1}"/>')
        shapes.append(_text(LEFT + WIDTH + 12, TOP + 14 + 18 * row, name, colour))
    size = f'width="{LEFT + WIDTH + LEGEND}" height="{TOP + HEIGHT + 24}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _percentiles(points: Series, end_s: float) -> list[tuple[float, float]]:
    bins: dict[int, list[float]] = {}
    for at_s, value in points:
        bins.setdefault(min(BINS - 1, int(BINS * at_s / end_s)), []).append(value)
    return [((number + 0.5) * end_s / BINS, float(np.percentile(bins[number], 95))) for number in sorted(bins)]


def _text(x: float, y: float, text: str, colour: str = "#222", is_bold: bool = False) -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{weight}>{escape(text)}</text>'
