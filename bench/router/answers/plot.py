"""Draws precision and recall over the threshold as an SVG."""

from collections.abc import Sequence
from pathlib import Path

from bench.router.answers.figures import Scored, point

WIDTH, HEIGHT, LEFT, TOP = 420, 240, 40, 30
FIRST = 0.8
CURVES = (("precision", True, "#1f6f8b", ""), ("recall", True, "#c8553d", ""), ("precision", False, "#1f6f8b", "4 3"))
INK = "#222"


def write_plot(path: Path, scored: Sequence[Scored], title: str, default: float) -> None:
    """Writes the curves from a threshold of `FIRST` to 1, and a line at the default one."""
    thresholds = [FIRST + (1 - FIRST) * step / 100 for step in range(101)]
    shapes = [_text(LEFT, 18, title, bold=True)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        shapes += [
            f'<path d="M{LEFT} {y:.0f}H{LEFT + WIDTH}" stroke="#ddd"/>',
            _text(LEFT - 5, y + 4, f"{share:.0%}", anchor="end"),
        ]
    for step in range(5):
        threshold = FIRST + (1 - FIRST) * step / 4
        shapes.append(_text(_x(threshold), TOP + HEIGHT + 16, f"{threshold:.2f}", anchor="middle"))
    shapes.append(f'<path d="M{_x(default):.1f} {TOP}V{TOP + HEIGHT}" stroke="{INK}" stroke-dasharray="2 3"/>')
    for row, (name, is_guarded, colour, dashes) in enumerate(CURVES):
        points = [point(scored, threshold, is_guarded=is_guarded) for threshold in thresholds]
        drawn = [(at.threshold, getattr(at, name)) for at in points if at.right + at.wrong]
        line = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in drawn)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        label = f"{name} {'with' if is_guarded else 'without'} the guard"
        shapes.append(_text(LEFT + 10, TOP + HEIGHT - 46 + 16 * row, f"{'- - ' if dashes else '—— '}{label}", fill=colour))
    shapes.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 32, "threshold", anchor="middle"))
    width, height = LEFT + WIDTH + 15, TOP + HEIGHT + 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    path.write_text("\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *shapes, "</svg>"]) + "\n")


def _x(threshold: float) -> float:
    return LEFT + WIDTH * (threshold - FIRST) / (1 - FIRST)


def _y(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False, fill: str = INK) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}"{weight}>{text}</text>'
