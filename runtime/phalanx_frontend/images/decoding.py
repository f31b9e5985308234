"""Decodes images within bounds of pixels, and cuts them into tiles.

Only the header is read before the bounds are checked. A JPEG may have many scans of all its pixels, so these are bounded too.
"""

import io
import re
import struct
from dataclasses import dataclass

from PIL import Image, ImageOps

from phalanx_api import wire
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.tiling import Tiling, tiling

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SCANS = 32
"""Of a JPEG; encoders write about ten."""
MAX_SEGMENTS = 4096
"""Of a JPEG; 20 MiB of metadata have 320."""
_SEGMENT = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
"""Start of a segment, which has a length, or the end. Others have none: restarts within a scan, fill bytes."""
MAX_TILES = 64
"""Of one image."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a model takes it."""

    taken: wire.ImageInput
    """How it was taken."""
    cut: Tiling
    width: int
    """Of a tile."""
    height: int
    pixels: bytes
    """Of all tiles, in order."""
    digest: bytes
    size: tuple[int, int] | None = None
    """See `wire.Image`."""


def decode(content: bytes, taken: wire.ImageInput, max_pixels: int, param: str) -> Picture:
    """Returns the tiles of an image file. Blocks. Raises ImageRefused that names `param`."""
    if content[:2] == b"\xff\xd8" and num_scans(content) > MAX_SCANS:
        raise ImageRefused(param, f"{param}: the JPEG has more than {MAX_SCANS} scans", "image_too_large")
    try:
        upright = _upright(content, max_pixels, param)
    except (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, struct.error) as error:
        # Pillow's readers raise any of these for a broken file; struct.error, which is none of the others, for truncated EXIF
        raise ImageRefused(param, f"{param}: the image cannot be read: use PNG, JPEG, WebP or GIF", "invalid_image") from error
    except Image.DecompressionBombError as error:
        raise ImageRefused(param, f"{param}: the image has more than {max_pixels} pixels", "image_too_large") from error
    try:
        cut = tiling(taken, upright.width, upright.height)
    except ValueError as error:
        raise ImageRefused(param, f"{param}: {error}", "invalid_image") from error
    if cut.num_tiles > MAX_TILES:
        raise ImageRefused(param, f"{param}: the image has more than {MAX_TILES} tiles: send a smaller one", "image_too_large")
    for width, height in cut.sizes:
        if min(width, height) < 1:  # a model without a least size rounds small edges down
            raise ImageRefused(param, f"{param}: the image is too small for the model: send a larger one", "invalid_image")
        _check_size(width * height, max_pixels, param)
    pixels = _pixels(upright, cut, taken)
    width, height = cut.sizes[-1] if taken.layout in ("grid", "rows") else (taken.width, taken.height)
    own = (upright.height, upright.width) if taken.layout in ("padded", "reduced") else None
    digest = wire.image_digest(pixels, cut.num_tiles, height, width, own)
    return Picture(taken, cut, width=width, height=height, pixels=pixels, digest=digest, size=own)


def _upright(content: bytes, max_pixels: int, param: str) -> Image.Image:
    """Returns the image as RGB, on white where it is transparent; the one in the file's mode is freed."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        _check_size(image.width * image.height, max_pixels, param)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits of grey, which Pillow clips to 8
            return image.point(lambda level: level / 256).convert("RGB")
        if not image.has_transparency_data:
            return image.convert("RGB")
        shown = image if image.mode == "RGBA" else image.convert("RGBA")
        canvas = Image.new("RGB", shown.size, "white")
        canvas.paste(shown, mask=shown)
        return canvas


def num_scans(content: bytes) -> int:
    """Returns the number of scans of a JPEG, up to its end: a photo may have a JPEG of its own in its EXIF, or after it.

    More than `MAX_SCANS` also if it has more than `MAX_SEGMENTS`.
    """
    count, at = 0, 2
    for _ in range(MAX_SEGMENTS):
        found = _SEGMENT.search(content, at)
        if found is None or found[1] == b"\xd9":
            return count
        count += found[1] == b"\xda"
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return MAX_SCANS + 1


def _check_size(num_pixels: int, max_pixels: int, param: str) -> None:
    if num_pixels > max_pixels:
        message = (
            f"{param}: the image has {num_pixels} pixels, perhaps once it fits the model or has a border; at most {max_pixels}"
        )
        raise ImageRefused(param, message, "image_too_large")


def _pixels(image: Image.Image, cut: Tiling, taken: wire.ImageInput) -> bytes:
    filter, tile = Image.Resampling(taken.resample), (taken.width, taken.height)
    original = image
    if taken.layout == "square":
        return _with_border(image, cut.sizes[0], taken.border).resize(tile, filter).tobytes()
    for size in cut.sizes:
        image = image.resize(size, filter)
    if taken.layout in ("grid", "rows"):
        return image.tobytes()
    if taken.layout == "whole":
        crops = _parts(original, cut, -(-original.width // max(cut.columns, 1)), -(-original.height // max(cut.rows, 1)))
        return b"".join(one.tobytes() for one in (_cropped(image, *tile), *(crop.resize(tile, filter) for crop in crops)))
    if taken.layout in ("padded", "reduced"):
        canvas = _with_border(image, (cut.columns * taken.width, cut.rows * taken.height), (0, 0, 0))
        return b"".join(one.tobytes() for one in (original.resize(tile, filter), *_parts(canvas, cut, *tile)))
    tiles, source = _parts(image, cut, *tile), original if taken.layout == "cut" else image
    last = source.resize(tile, filter) if tiles else image
    return b"".join(one.tobytes() for one in (*tiles, last))


def _with_border(image: Image.Image, size: tuple[int, int], colour: tuple[int, int, int]) -> Image.Image:
    canvas = Image.new("RGB", size, colour)
    canvas.paste(image, ((canvas.width - image.width) // 2, (canvas.height - image.height) // 2))
    return canvas


def _parts(image: Image.Image, cut: Tiling, width: int, height: int) -> list[Image.Image]:
    """Returns the rows and columns of parts of this size; the last ones may be smaller."""
    return [
        image.crop((column * width, row * height, min((column + 1) * width, image.width), min((row + 1) * height, image.height)))
        for row in range(cut.rows)
        for column in range(cut.columns)
    ]


def _cropped(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
