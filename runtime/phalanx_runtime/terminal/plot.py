"""Cumulative distributions of latencies as lines and labels, written as SVG or PNG. Pure.

No library that draws is a dependency: PNG takes zlib, and letters of 3 x 5 dots.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from phalanx_runtime.terminal.figures import percentile

WIDTH, HEIGHT, LEFT, TOP, GAP = 480, 150, 70, 40, 60
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#8a5a9e", "#d4a017", "#3a3a3a")
INK, GRID = "#222222", "#dddddd"
NUM_POINTS = 200
"""Of each line."""
SCALE = 2
"""Pixels of a letter's dot."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,%/-:=() "
_DOTS = (
    "25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644 25563 65655 34216 72222"
    " 55557 55552 55775 55255 55222 71247 75557 26227 61247 61216 55711 74616 34757 71122 75757 75716 00002 00024 51245 11244"
    " 00700 02020 07070 12221 42224 00000"
)
_GLYPHS = dict(zip(_LETTERS, _DOTS.split(), strict=True))
"""Rows of dots: each digit is a row from top to bottom, its bits from left to right."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Samples in ms, by the name of their line."""

    title: str
    samples: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text whose anchor is at a point."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = INK


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes on white."""

    width: int
    height: int
    shapes: Sequence[Line | Label]


def draw(panels: Sequence[Panel]) -> Drawing:
    """Returns a panel below another: the share of samples up to each time, to the highest 99th percentile."""
    shapes: list[Line | Label] = []
    for number, panel in enumerate(panels):
        shapes += _panel(panel, TOP + number * (HEIGHT + GAP))
    return Drawing(LEFT + WIDTH + 30, TOP + len(panels) * (HEIGHT + GAP), shapes)


def _panel(panel: Panel, top: int) -> list[Line | Label]:
    filled = [values for values in panel.samples.values() if values]
    longest = max((percentile(values, 99) for values in filled), default=0.0) or 1.0
    shapes: list[Line | Label] = [Label(LEFT, top - 12, f"{panel.title}, ms")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, x = top + HEIGHT * (1 - share), LEFT + WIDTH * share
        shapes.append(Line([(LEFT, y), (LEFT + WIDTH, y)], GRID))
        shapes.append(Label(LEFT - 8, y + 5, f"{share * 100:.0f}%", "end"))
        shapes.append(Label(x, top + HEIGHT + 18, f"{longest * share:.4g}", "middle"))
    for number, (name, unordered) in enumerate(panel.samples.items()):
        values = sorted(unordered)
        colour = COLOURS[number % len(COLOURS)]
        if values:
            shares = [0.99 * step / NUM_POINTS for step in range(NUM_POINTS + 1)]
            places = [(percentile(values, 100 * share), share) for share in shares]
            line = [(LEFT + WIDTH * min(1.0, ms / longest), top + HEIGHT * (1 - share)) for ms, share in places]
            shapes.append(Line(line, colour))
        shapes.append(Label(LEFT + WIDTH - 8, top + HEIGHT - 12 - 16 * number, name, "end", colour))
    return shapes


def to_svg(drawing: Drawing) -> str:
    """Returns the document."""
    size = f'width="{drawing.width}" height="{drawing.height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
    ]
    for shape in drawing.shapes:
        if isinstance(shape, Line):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            lines.append(f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="1.5"/>')
        else:
            place = f'x="{shape.x:.0f}" y="{shape.y:.0f}" text-anchor="{shape.anchor}" fill="{shape.colour}"'
            lines.append(f"<text {place}>{escape(shape.text)}</text>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def to_png(drawing: Drawing) -> bytes:
    """Returns the file, 8 bits per colour."""
    rows = [bytearray(b"\xff" * 3 * drawing.width) for _ in range(drawing.height)]
    for shape in drawing.shapes:
        if isinstance(shape, Line):
            for (x0, y0), (x1, y1) in zip(shape.points, shape.points[1:], strict=False):
                _segment(rows, (x0, y0), (x1, y1), bytes.fromhex(shape.colour[1:]))
        else:
            _text(rows, shape)
    header = struct.pack(">II", drawing.width, drawing.height) + bytes((8, 2, 0, 0, 0))  # RGB, not interlaced
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _segment(rows: list[bytearray], start: tuple[float, float], end: tuple[float, float], colour: bytes) -> None:
    (x0, y0), (x1, y1) = start, end
    steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
    for step in range(steps + 1):
        _dot(rows, round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps), colour)


def _text(rows: list[bytearray], label: Label) -> None:
    """Draws capitals above the baseline; a letter without a glyph stays blank."""
    advance, colour = 4 * SCALE, bytes.fromhex(label.colour[1:])
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[label.anchor] * advance * len(label.text)
    for place, letter in enumerate(label.text.upper()):
        left = round(label.x - shift) + advance * place
        for row, bits in enumerate(_GLYPHS.get(letter, _GLYPHS[" "])):
            for column in range(3):
                if int(bits) & (4 >> column):
                    for dot in range(SCALE * SCALE):
                        y = round(label.y) + SCALE * (row - 5) + dot // SCALE
                        _dot(rows, left + SCALE * column + dot % SCALE, y, colour)


def _dot(rows: list[bytearray], x: int, y: int, colour: bytes) -> None:
    if 0 <= y < len(rows) and 0 <= 3 * x < len(rows[y]):
        rows[y][3 * x : 3 * x + 3] = colour
