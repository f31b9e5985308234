"""Decodes images within bounds of pixels, and cuts them into tiles.

Only the header is read before the bounds are checked. A JPEG may have many scans of all its pixels, so these are bounded too.
"""

import io
from dataclasses import dataclass

from PIL import Image, ImageOps

from phalanx_api import wire
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.tiling import Tiling, tiling

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SCANS = 32
"""Of a JPEG; encoders write about ten."""
MAX_TILES = 64
"""Of one image."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a model takes it."""

    cut: Tiling
    pixels: bytes
    """Of all tiles, in order."""
    digest: bytes


def decode(content: bytes, taken: wire.ImageInput, max_pixels: int, param: str) -> Picture:
    """Returns the tiles of an image file. Blocks. Raises ImageRefused that names `param`."""
    if content[:2] == b"\xff\xd8" and content.count(b"\xff\xda") > MAX_SCANS:
        raise ImageRefused(param, f"{param}: the JPEG has more than {MAX_SCANS} scans", "image_too_large")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(image.width * image.height, max_pixels, param)
            image.load()
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, ArithmeticError, IndexError, KeyError, TypeError, AttributeError) as error:
        # Pillow's readers raise any of these for a broken file
        raise ImageRefused(param, f"{param}: the image cannot be read: use PNG, JPEG, WebP or GIF", "invalid_image") from error
    except Image.DecompressionBombError as error:
        raise ImageRefused(param, f"{param}: the image has more than {max_pixels} pixels", "image_too_large") from error
    cut = tiling(taken, upright.width, upright.height)
    if cut.num_tiles > MAX_TILES:
        raise ImageRefused(param, f"{param}: the image has more than {MAX_TILES} tiles: send a smaller one", "image_too_large")
    for width, height in cut.sizes:
        _check_size(width * height, max_pixels, param)
    pixels = _pixels(upright, cut, taken)
    return Picture(cut, pixels, wire.image_digest(pixels, cut.num_tiles, taken.height, taken.width))


def _check_size(num_pixels: int, max_pixels: int, param: str) -> None:
    if num_pixels > max_pixels:
        message = (
            f"{param}: the image has {num_pixels} pixels, perhaps once its shorter edge fits the model; at most {max_pixels}"
        )
        raise ImageRefused(param, message, "image_too_large")


def _pixels(image: Image.Image, cut: Tiling, taken: wire.ImageInput) -> bytes:
    filter = Image.Resampling(taken.resample)
    for size in cut.sizes:
        image = image.resize(size, filter)
    if taken.layout == "whole":
        return _cropped(image, taken.width, taken.height).tobytes()
    tiles = [
        image.crop((column * taken.width, row * taken.height, (column + 1) * taken.width, (row + 1) * taken.height))
        for row in range(cut.rows)
        for column in range(cut.columns)
    ]
    last = image.resize((taken.width, taken.height), filter) if tiles else image
    return b"".join(tile.tobytes() for tile in (*tiles, last))


def _cropped(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
