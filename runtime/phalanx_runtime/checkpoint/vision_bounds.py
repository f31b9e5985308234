"""Bounds of the image settings in a model's files, which may come from anybody: routers and ranks compute with them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_api import wire

MAX_TILE_TOKENS = 8192
"""Routers write a name for each token of an image into the text of a prompt."""
MIN_CELL_EDGE = 4
"""Of images that keep their ratio, whose tokens are as many as their cells."""
MAX_LENGTH = 1 << 20
"""Pixels of an edge, before the router's bound of pixels applies."""
MAX_PIXELS = 1 << 40
MAX_RESOLUTIONS = 1024
MAX_NAME = 128
"""Characters of the name of a token."""
MAX_CROPS = 63
"""With the whole image, routers take 64 tiles."""
MAX_SCALE = 1e6
"""Largest factor, mean and deviation of pixels; the inverse is the smallest deviation."""
MAX_REASON = 500
"""Characters of the reason why a model takes no images, which clients get."""
_CONFIG, _STEPS = "config.json", "preprocessor_config.json"
_NUMBERS: Mapping[str, tuple[str, int, int]] = {
    "token_id": (f"{_CONFIG}: image_token_id", 0, 2**31 - 1),
    "tile_tokens": (f"{_CONFIG}: the number of tokens of a tile, by its patches,", 1, MAX_TILE_TOKENS),
    "height": (f"{_STEPS}: the height of a tile", 1, wire.MAX_TILE_EDGE),
    "width": (f"{_STEPS}: the width of a tile", 1, wire.MAX_TILE_EDGE),
    "resample": (f"{_STEPS}: resample", 0, 5),
    "shortest_edge": (f"{_STEPS}: size: shortest_edge", 0, wire.MAX_TILE_EDGE),
    "longest_edge": (f"{_STEPS}: size: longest_edge", 0, MAX_LENGTH),
    "min_pixels": (f"{_STEPS}: min_pixels", 0, MAX_PIXELS),
    "max_pixels": (f"{_STEPS}: max_pixels", 0, MAX_PIXELS),
    "max_cells": (f"{_CONFIG}: vision_aspect_ratio: the number of tokens", 0, 2**31 - 1),
    "max_crops": (f"{_STEPS}: pan_and_scan_max_num_crops", 0, MAX_CROPS),
    "min_crop_edge": (f"{_STEPS}: pan_and_scan_min_crop_size", 0, MAX_LENGTH),
    "min_tiles": (f"{_STEPS}: min_patches", 0, MAX_CROPS),
    "max_tiles": (f"{_STEPS}: max_patches", 0, MAX_CROPS),
}
"""File and field, the least and the most by field of `wire.ImageInput`."""
_TEXTS = ("token", "run_token", "before", "after", "row_end")


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How bytes of pixels become numbers."""

    factor: float
    """0: they are not scaled."""
    mean: Sequence[float]
    """Of each channel; empty: they are not normalised."""
    std: Sequence[float]


def checked_input(taken: wire.ImageInput) -> wire.ImageInput:
    """Returns the input. Raises ValueError with file and field for a number or text that is out of bounds."""
    for field, (name, least, most) in _NUMBERS.items():
        _check(name, getattr(taken, field), least, most)
    if taken.layout in ("grid", "rows"):
        _check(
            f"{_CONFIG}: vision_config: the edge of a token", min(taken.height, taken.width), MIN_CELL_EDGE, wire.MAX_TILE_EDGE
        )
    if taken.min_pixels > taken.max_pixels:
        raise ValueError(f"{_STEPS}: min_pixels {taken.min_pixels} is more than max_pixels {taken.max_pixels}")
    if not 0 <= taken.min_crop_ratio <= MAX_SCALE:
        raise ValueError(
            f"{_STEPS}: pan_and_scan_min_ratio_to_activate {taken.min_crop_ratio} must be within 0 and {MAX_SCALE:g}"
        )
    _check(f"{_CONFIG}: image_grid_pinpoints: the number of resolutions", len(taken.resolutions), 0, MAX_RESOLUTIONS)
    for length in (length for resolution in taken.resolutions for length in resolution):
        _check(f"{_CONFIG}: image_grid_pinpoints:", length, 1, MAX_LENGTH)
    for share in taken.border:
        _check(f"{_STEPS}: image_mean: the border", share, 0, 255)
    for field in _TEXTS:
        text = getattr(taken, field)
        if len(text) > MAX_NAME or not _is_unicode(text):
            raise ValueError(f"tokenizer.json or processor_config.json: {text!r:.80} is no name of a token of an image")
    if not taken.token:
        raise ValueError(f"tokenizer.json: the token {taken.token_id} of images has no name")
    if taken.several is not None:
        checked_input(taken.several)
    return taken


def _is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which JSON may have and UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        shown = value if abs(value) < 2**63 else "of many digits"
        raise ValueError(f"{name} {shown} must be within {least} and {most}")


def reason(why: str) -> str:
    """Returns the start of a reason that clients get, as text that can be sent."""
    return why.encode(errors="backslashreplace").decode()[:MAX_REASON]


def checked_scale(factor: Any, mean: Any, std: Any) -> PixelScale:
    """Returns the scale. Raises ValueError with file and field for numbers that make pixels infinite."""
    if not 0 <= (found := _number("rescale_factor", factor)) <= MAX_SCALE:
        raise ValueError(f"{_STEPS}: rescale_factor {found:g} must be within 0 and {MAX_SCALE:g}")
    channels = {"image_mean": _channels("image_mean", mean), "image_std": _channels("image_std", std)}
    if any(abs(number) > MAX_SCALE for number in channels["image_mean"]):
        raise ValueError(f"{_STEPS}: image_mean {channels['image_mean']} must be within {MAX_SCALE:g}")
    if not all(1 / MAX_SCALE <= number <= MAX_SCALE for number in channels["image_std"]):
        raise ValueError(f"{_STEPS}: image_std {channels['image_std']} must be within {1 / MAX_SCALE:g} and {MAX_SCALE:g}")
    if bool(channels["image_mean"]) != bool(channels["image_std"]):
        raise ValueError(f"{_STEPS}: image_mean and image_std must both have numbers, or none")
    return PixelScale(found, channels["image_mean"], channels["image_std"])


def _channels(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) not in (0, 3):
        raise ValueError(f"{_STEPS}: {name} must be a list of three numbers")
    return tuple(_number(name, number) for number in value)


def _number(name: str, value: Any) -> float:
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{_STEPS}: {name} must be a number")
    return found
