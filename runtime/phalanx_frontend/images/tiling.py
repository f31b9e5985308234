"""Tiles and placeholder tokens of an image by its size, equal to those of the processors of `transformers`.

whole   resized so that the shorter edge fits, then the centre is cropped; or resized to one tile, as are crops of a long image
tiles   resized to the longest edge, then to whole tiles, which precede the image in one tile
grid    resized to whole cells within bounds of pixels
rows    reduced to the longest edge, then resized to whole cells
padded  resized to one tile; then to fit the resolution that keeps most of its pixels, whose tiles follow
reduced as padded; the cells of a large image are interpolated to fewer
square  made a square by a border, then resized to one tile
cut     resized to a grid of tiles with about its ratio, which precede the image in one tile
"""

import math
from dataclasses import dataclass

from phalanx_api import wire

MAX_RATIO = 200
"""Of the edges of an image in a grid."""
LEAST_REDUCTION = 1.1
"""Ratio of the edges of all cells to those of `max_cells` above which an image is reduced."""
MAX_EDGE = 4096
"""Edge above which a processor of tiles reduces an image, whatever its settings."""
ORIGINAL, CROPS = "Here is the original image ", " and here are some crops to help you see better "
"""Text before the tokens of an image with crops, and before those of its crops: the models are trained with it."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How an image becomes tiles."""

    sizes: tuple[tuple[int, int], ...]
    """(width, height) of each step of resizing."""
    rows: int = 0
    """Rows and columns of tiles, or of crops, without the tile with the image; 0: only that."""
    columns: int = 0
    shown: tuple[int, int] = (0, 0)
    """Rows and columns of cells within all tiles that are not of the border."""

    @property
    def num_tiles(self) -> int:
        """All tiles."""
        return self.rows * self.columns + 1


def tiling(taken: wire.ImageInput, width: int, height: int) -> Tiling:
    """Returns the tiling of an image of this size. Raises ValueError for one that is too narrow."""
    if taken.layout == "grid":
        return Tiling((_whole_cells(taken, width, height),))
    if taken.layout == "rows":
        return Tiling((_within_longest(taken, width, height),))
    if taken.layout in ("padded", "reduced"):
        return _padded(taken, width, height)
    if taken.layout == "square":
        return Tiling(((max(width, height),) * 2, (taken.width, taken.height)))
    if taken.layout == "cut":
        rows, columns = _nearest(taken, width, height)
        size = (columns * taken.width, rows * taken.height)
        return Tiling((size,), *((rows, columns) if rows * columns > 1 else (0, 0)))
    if taken.layout == "whole":
        if not taken.shortest_edge:
            return Tiling(((taken.width, taken.height),), *_crops(taken, width, height))
        longer = int(taken.shortest_edge * max(width, height) / min(width, height))
        size = (taken.shortest_edge, longer) if width <= height else (longer, taken.shortest_edge)
        return Tiling((size,))
    sizes = list[tuple[int, int]]()
    if taken.longest_edge:
        width, height = _below(*_with_longest(width, height, taken.longest_edge))
        sizes.append((width, height))
    if not taken.is_split:
        return Tiling((*sizes, (taken.width, taken.height)))
    width, height = _whole_tiles(width, height, taken.width)
    sizes.append((width, height))
    if width <= taken.width and height <= taken.height:
        return Tiling(tuple(sizes))
    return Tiling(tuple(sizes), height // taken.height, width // taken.width)


def num_tokens(taken: wire.ImageInput, cut: Tiling) -> int:
    """Returns the placeholders of an image."""
    if taken.layout in ("padded", "reduced"):
        rows, columns = cut.shown
        return taken.tile_tokens + rows * (columns + 1)  # one ends the row
    if taken.layout not in ("grid", "rows"):
        return cut.num_tiles * taken.tile_tokens
    width, height = cut.sizes[-1]
    return (width // taken.width) * (height // taken.height)


def _nearest(taken: wire.ImageInput, width: int, height: int) -> tuple[int, int]:
    """Returns rows and columns of the grid with the nearest ratio; of equal ones the largest with less than twice the pixels."""
    edges, ratio, best, least = range(1, taken.max_tiles + 1), width / height, (1, 1), math.inf
    grids = [(rows, columns) for columns in edges for rows in edges if taken.min_tiles <= rows * columns <= taken.max_tiles]
    for rows, columns in sorted(grids, key=math.prod):
        distance = abs(ratio - columns / rows)
        if distance < least or (distance == least and width * height > 0.5 * taken.height * taken.width * rows * columns):
            best, least = (rows, columns), distance
    return best


def _whole_cells(taken: wire.ImageInput, width: int, height: int) -> tuple[int, int]:
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"one edge is more than {MAX_RATIO} times as long as the other")
    edge, num_pixels = taken.width, width * height
    across, down = (round(length / edge) * edge for length in (width, height))
    if across * down > taken.max_pixels:
        stretch = math.sqrt(num_pixels / taken.max_pixels)
        across, down = (max(edge, math.floor(length / stretch / edge) * edge) for length in (width, height))
    elif across * down < taken.min_pixels:
        stretch = math.sqrt(taken.min_pixels / num_pixels)
        across, down = (math.ceil(length * stretch / edge) * edge for length in (width, height))
    return across, down


def _within_longest(taken: wire.ImageInput, width: int, height: int) -> tuple[int, int]:
    ratio = max(width / taken.longest_edge, height / taken.longest_edge, 1.0)
    across, down = (math.floor(length / ratio) if ratio > 1 else length for length in (width, height))
    if not across or not down:
        raise ValueError("one edge is too short beside the other")
    return math.ceil(across / taken.width) * taken.width, math.ceil(down / taken.height) * taken.height


def _crops(taken: wire.ImageInput, width: int, height: int) -> tuple[int, int]:
    """Returns rows and columns of crops, (0, 0) without any: a long image is cut along its longer edge."""
    longer, shorter, least = max(width, height), min(width, height), taken.min_crop_edge
    if not taken.max_crops or longer / shorter < taken.min_crop_ratio:
        return 0, 0
    count = min(taken.max_crops, max(2, min(longer // least, math.floor(longer / shorter + 0.5))))
    edge = math.ceil(longer / count)
    if min(edge, shorter) < least:
        return 0, 0
    if edge * (count - 1) >= longer:
        raise ValueError(f"it is too short for {count} crops")
    return (1, count) if width >= height else (count, 1)


def _padded(taken: wire.ImageInput, width: int, height: int) -> Tiling:
    down, across = max(taken.resolutions, key=lambda resolution: _kept_pixels(resolution, width, height))
    scale, of_height = across / width, down / height
    if scale < of_height:
        fitted = across, min(math.ceil(height * scale), down)
    else:
        fitted = min(math.ceil(width * of_height), across), down
    rows, columns = down // taken.height, across // taken.width
    side = math.isqrt(taken.tile_tokens)
    shown = _shown(side * rows, side * columns, width, height)
    return Tiling((fitted,), rows, columns, _reduced(*shown, taken.max_cells) if taken.layout == "reduced" else shown)


def _reduced(rows: int, columns: int, most: int) -> tuple[int, int]:
    ratio = math.sqrt(rows * columns / most)
    return (int(rows // ratio), int(columns // ratio)) if ratio > LEAST_REDUCTION else (rows, columns)


def _kept_pixels(resolution: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Returns what the best resolution has most of: pixels of the image, and the fewest others."""
    down, across = resolution
    scale = min(across / width, down / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - down * across


def _shown(rows: int, columns: int, width: int, height: int) -> tuple[int, int]:
    """Returns the rows and columns of cells that an image has without its border."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


def _with_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Keeps the ratio; the shorter edge is even."""
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return longest, max(1, shorter + shorter % 2)
    shorter = int(longest * ratio)
    return max(1, shorter + shorter % 2), longest


def _below(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        return MAX_EDGE, max(1, int(MAX_EDGE / ratio))
    if height > width and height > MAX_EDGE:
        return max(1, int(MAX_EDGE * ratio)), MAX_EDGE
    return width, height


def _whole_tiles(width: int, height: int, edge: int) -> tuple[int, int]:
    """Rounds the longer edge up first; the other one follows it."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        return width, math.ceil(int(width / ratio) / edge) * edge
    height = math.ceil(height / edge) * edge
    return math.ceil(int(height * ratio) / edge) * edge, height


def placeholder(taken: wire.ImageInput, cut: Tiling) -> str:
    """Returns the placeholder tokens of an image, as text."""
    name = taken.run_token or taken.token
    if taken.layout in ("grid", "padded", "reduced", "square"):
        return name * num_tokens(taken, cut)
    if taken.layout == "rows":
        width, height = cut.sizes[-1]
        rows = [name * (width // taken.width)] * (height // taken.height)
        return f"{taken.row_end.join(rows)}{taken.after}"
    if taken.layout == "cut":
        return f"{taken.before}{name * num_tokens(taken, cut)}{taken.after}"
    run = name * taken.tile_tokens
    if taken.layout == "whole":
        one, crops = f"{taken.before}{run}{taken.after}", cut.num_tiles - 1
        return f"{ORIGINAL}{one}{CROPS}{' '.join([one] * crops)}" if crops else one
    text = ""
    for row in range(cut.rows):
        for column in range(cut.columns):
            text += f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{run}"
        text += "\n"
    return f"{text}{chr(10) if cut.rows else ''}<fake_token_around_image><global-img>{run}<fake_token_around_image>"
