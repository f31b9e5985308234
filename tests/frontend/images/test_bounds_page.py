"""docs/images.md states the bounds of the code."""

import pathlib

import pytest

from phalanx_frontend.images.budget import MAX_BYTES
from phalanx_frontend.images.decoding import MAX_SCANS, MAX_TILES
from phalanx_frontend.images.fetching import MAX_REDIRECTS, TIMEOUT_S
from phalanx_frontend.images.source import MAX_CONCURRENT, ImageBounds
from phalanx_frontend.limits import DEFAULT_LIMITS, has_room

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "images.md"
MIB = 1 << 20
BOUNDS = ImageBounds()


@pytest.mark.parametrize(
    ("words", "constant"),
    [
        ("| images of a request | 16 |", BOUNDS.max_images == 16),
        ("20 MiB, in a body of at most 32 MiB", (BOUNDS.max_bytes, DEFAULT_LIMITS.max_body_bytes) == (20 * MIB, 32 * MIB)),
        ("also when it is resized or gets a border | 25 million |", BOUNDS.max_pixels == 25_000_000),
        ("| tiles of an image | 64 |", MAX_TILES == 64),
        ("times its choices (`n`) | 64 MiB |", BOUNDS.max_tile_bytes == 64 * MIB),
        ("| scans of a JPEG | 32 |", MAX_SCANS == 32),
        ("all of a request are read at once | 10 s |", TIMEOUT_S == 10),
        ("| redirects | 3 |", MAX_REDIRECTS == 3),
        ("hold | 1 GiB; a tenant", MAX_BYTES == 1024 * MIB),
        ("at most as much as is left free: 1/2 alone", (has_room(1, 5, 5, 12), has_room(1, 6, 6, 12)) == (True, False)),
        ("A process decodes two images at a time", MAX_CONCURRENT == 2),
    ],
)
def test_page_states_the_bounds_of_the_code(words: str, constant: bool) -> None:
    assert words in " ".join(PAGE.read_text().split()) and constant
