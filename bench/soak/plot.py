"""Draws the metrics of all processes over time as an SVG: a panel for each metric, a line for each life of a process."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bench.soak.record import Run
from bench.soak.slopes import Point

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 620, 130, 80, 30, 46, 170
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#8a5a9e", "#d4a017", "#3a3a3a", "#2a9d8f", "#b56576", "#6d8ea0", "#9c6644")
INK, GRID = "#222", "#ddd"
MAX_POINTS = 400
"""Of a line; more are thinned out."""
Series = Mapping[tuple[str, str], Sequence[Point]]


def write_plot(path: Path, run: Run, series: Series, titles: Mapping[str, str]) -> None:
    """Writes one panel for each metric of `titles`; dashed lines mark starts of pieces, ticks below the axis faults."""
    path.write_text(chart(run, series, titles))


def chart(run: Run, series: Series, titles: Mapping[str, str]) -> str:
    """Returns the SVG."""
    processes = sorted({process for process, _ in series})
    colours = {process: COLOURS[number % len(COLOURS)] for number, process in enumerate(processes)}
    longest_s = max(run.seconds, 1.0)
    shapes = list[str]()
    for row, (metric, title) in enumerate(titles.items()):
        top = TOP + row * (HEIGHT + GAP)
        drawn = {process: series[process, metric] for process in processes if (process, metric) in series}
        shapes += _panel(top, title, drawn, colours, longest_s)
        shapes += [_mark(piece.at_s / longest_s, top) for piece in run.pieces[1:]]
        shapes += [_tick(strike.at_s / longest_s, top) for strike in run.strikes]
    for number, process in enumerate(processes):
        y = TOP + 14 * number + 10
        shapes.append(_text(LEFT + WIDTH + 14, y, process, fill=colours[process]))
    width, height = LEFT + WIDTH + LEGEND, max(TOP + len(titles) * (HEIGHT + GAP), TOP + 14 * len(processes) + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _panel(
    top: float, title: str, drawn: Mapping[str, Sequence[Point]], colours: Mapping[str, str], longest_s: float
) -> list[str]:
    highest = max((point.value for points in drawn.values() for point in points), default=0.0) or 1.0
    shapes = [_text(LEFT, top - 8, title, bold=True)]
    for share in (0.0, 0.5, 1.0):
        y = top + HEIGHT * (1 - share)
        shapes.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="{GRID}"/>')
        shapes.append(_text(LEFT - 6, y + 4, f"{highest * share:,.0f}", anchor="end"))
        shapes.append(_text(LEFT + WIDTH * share, top + HEIGHT + 20, f"{longest_s * share / 60:.0f} min", anchor="middle"))
    for process, points in drawn.items():
        for life in dict.fromkeys(point.life for point in points):
            own = [point for point in points if point.life == life]
            step = max(1, len(own) // MAX_POINTS)
            places = (
                f"{LEFT + WIDTH * point.at_s / longest_s:.1f},{top + HEIGHT * (1 - point.value / highest):.1f}"
                for point in own[::step]
            )
            shapes.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colours[process]}" stroke-width="1.2"/>')
    return shapes


def _mark(share: float, top: float) -> str:
    return f'<path d="M{LEFT + WIDTH * share:.1f} {top}v{HEIGHT}" stroke="{INK}" stroke-dasharray="3 3"/>'


def _tick(share: float, top: float) -> str:
    return f'<path d="M{LEFT + WIDTH * share:.1f} {top + HEIGHT}v5" stroke="{COLOURS[1]}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False, fill: str = INK) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
