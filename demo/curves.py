"""Draws a dashboard as a page: curves of its panels as SVG. Without Grafana, which no package registry has."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.frame.prometheus import RangeSeries
from tools.dashboards.records import Dashboard, Panel

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420, 150, 58, 10, 18
COLOURS = ("#2f7f9e", "#c4563b", "#6b8e23", "#8a6fb0", "#b08a2e", "#3f9f8f", "#c06a9a", "#7d7d7d")
_STYLE = """
:root { color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }
body { margin: 1rem; } nav a { margin-right: 1rem; } .alert { color: #c4563b; font-weight: 600; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 1rem; }
h2 { grid-column: 1 / -1; margin: .5rem 0 0; font-size: 1rem; } figure { margin: 0; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; font-size: 11px; } svg text { fill: currentColor; }
.legend span { margin-right: .8rem; white-space: nowrap; } summary { cursor: pointer; opacity: .7; }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel."""

    legend: str
    points: Sequence[tuple[float, float]]
    """(Unix time, value)."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a page shows of a dashboard: curves by the title of their panel, and the times of its annotations by title."""

    curves: Mapping[str, Sequence[Curve]]
    marks: Mapping[str, Sequence[float]]
    start_s: float
    end_s: float


def curves(legend: str, found: Sequence[RangeSeries]) -> list[Curve]:
    """Returns the curves of a query. `legend`: with labels in double braces, as in Grafana; empty: all labels."""

    def named(labels: Mapping[str, str]) -> str:
        if not legend:
            return ", ".join(value for name, value in sorted(labels.items()) if name != "__name__") or "value"
        return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend)

    return [Curve(named(each.labels), each.points) for each in found if each.points]


def page(dashboard: Dashboard, links: Mapping[str, str], drawn: Drawn, alerts: Sequence[str], refresh_s: int) -> str:
    """Returns the page as HTML. `links`: address by title; alerts: names of those that fire."""
    nav = "".join(f'<a href="{escape(address)}">{escape(title)}</a>' for title, address in links.items())
    quiet = "<p>No alert fires. Most alerts need their condition for minutes.</p>"
    firing = f'<p class="alert">Alerts: {escape(", ".join(alerts))}</p>' if alerts else quiet
    marked = ", ".join(f"{title} ({len(times)})" for title, times in drawn.marks.items() if times)
    dashed = f"<p>Dashed lines: {escape(marked)}; point at one for its kind.</p>" if marked else ""
    parts = [f"<nav>{nav}</nav><h1>{escape(dashboard.title)}</h1><p>{escape(dashboard.description)}</p>{firing}{dashed}<main>"]
    for row in dashboard.rows:
        parts.append(f"<h2>{escape(row.title)}</h2>")
        parts += [_figure(panel, drawn) for panel in row.panels]
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{refresh_s}"><title>{escape(dashboard.title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{"".join(parts)}</main></body></html>'


def _figure(panel: Panel, drawn: Drawn) -> str:
    lines = drawn.curves.get(panel.title, ())
    body = _svg(panel, lines, drawn) if lines else "<p>no data</p>"
    named = "".join(
        f'<span><svg width="10" height="10" style="width:10px"><rect width="10" height="10" fill="{_colour(number)}"/></svg> '
        f"{escape(line.legend)}</span>"
        for number, line in enumerate(lines)
    )
    about = f"<details><summary>about</summary>{escape(panel.description)}</details>"
    return f'<figure><figcaption>{escape(panel.title)}</figcaption>{body}<div class="legend">{named}</div>{about}</figure>'


def _svg(panel: Panel, lines: Sequence[Curve], drawn: Drawn) -> str:
    largest = max((value for line in lines for _, value in line.points), default=0.0)
    highest = largest or 1.0  # all are zero: no number at the top of the axis
    span = max(drawn.end_s - drawn.start_s, 1.0)

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT) * (at_s - drawn.start_s) / span

    shapes = [f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}H{WIDTH}" fill="none" stroke="currentColor" opacity=".4"/>']
    for title, times in drawn.marks.items():
        for at_s in times:
            line = f'<path d="M{x(at_s):.1f} {TOP}V{TOP + HEIGHT}" stroke="#888" stroke-dasharray="3">'
            shapes.append(f"{line}<title>{escape(title)}</title></path>")
    for number, curve in enumerate(lines):
        points = " ".join(f"{x(at_s):.1f},{TOP + HEIGHT * (1 - value / highest):.1f}" for at_s, value in curve.points)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" stroke-width="1.5"/>')
    top = escape(amount(largest, panel.unit)) if largest else ""
    shapes.append(f'<text x="0" y="{TOP + 10}">{top}</text><text x="0" y="{TOP + HEIGHT}">0</text>')
    shapes.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 14}">{span / 60:.0f} min ago</text>')
    shapes.append(f'<text x="{WIDTH}" y="{TOP + HEIGHT + 14}" text-anchor="end">now</text>')
    label = escape(f"{panel.title}: {', '.join(f'{line.legend} {amount(line.points[-1][1], panel.unit)}' for line in lines)}")
    return f'<svg viewBox="0 0 {WIDTH} {TOP + HEIGHT + BOTTOM}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def amount(value: float, unit: str) -> str:
    """Returns a value with its unit, one of `tools.dashboards.records.Unit`."""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "bytes":
        steps = ("B", "KiB", "MiB", "GiB", "TiB")
        power = next((step for step in range(len(steps) - 1) if value < 1024 ** (step + 1)), len(steps) - 1)
        return f"{value / 1024**power:.3g} {steps[power]}"
    return f"{value:.3g}{ {'reqps': ' req/s', 'ops': '/s', 'watt': ' W'}.get(unit, '') }"


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
