"""Image files within bounds: formats, sizes, tiles."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from phalanx_api import wire
from phalanx_frontend.images.decoding import MAX_SCANS, MAX_SEGMENTS, decode, num_scans
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.tiling import placeholder, tiling
from tests.frontend.images.pictures import TAKEN, TILED, bomb, colour, file_of

MAX_PIXELS = 10_000
GRID = wire.ImageInput(
    layout="grid", token="once", token_id=1, tile_tokens=1, height=4, width=4, resample=3, min_pixels=64, max_pixels=400
)


def refusal(content: bytes, taken: wire.ImageInput = TAKEN) -> str:
    with pytest.raises(ImageRefused) as caught:
        decode(content, taken, MAX_PIXELS, "messages[0].content")
    assert caught.value.param == "messages[0].content"
    return caught.value.code


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats_of_the_web_are_read(format: str) -> None:
    picture = decode(file_of(colour(255), format), TAKEN, MAX_PIXELS, "x")
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(8, 8, 3)
    assert pixels[..., 0].min() > 240 and pixels[..., 1:].max() < 20


def test_an_animation_shows_its_first_frame() -> None:
    animated = file_of(colour(255), "GIF", save_all=True, append_images=[colour(0)])
    assert decode(animated, TAKEN, MAX_PIXELS, "x") == decode(file_of(colour(255)), TAKEN, MAX_PIXELS, "x")


def black_on_nothing(mode: str) -> Image.Image:
    image = Image.new(mode, (20, 8))
    if mode == "P":
        image.putpalette([0] * 6)
    ink: dict[str, int | tuple[int, ...]] = {"RGBA": (0, 0, 0, 255), "LA": (0, 255), "P": 1}
    image.paste(ink[mode], (4, 0, 8, 8))
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode: str) -> None:
    """As in the processors of `transformers`: black text on nothing is legible."""
    options: dict[str, Any] = {"transparency": 0} if mode == "P" else {}
    picture = decode(file_of(black_on_nothing(mode), **options), GRID, MAX_PIXELS, "x")
    row = np.frombuffer(picture.pixels, np.uint8).reshape(8, 20, 3)[3]
    assert row.tolist() == [[255] * 3] * 4 + [[0] * 3] * 4 + [[255] * 3] * 12


def test_half_transparent_pixels_are_between() -> None:
    picture = decode(file_of(Image.new("RGBA", (20, 8), (255, 0, 55, 128))), GRID, MAX_PIXELS, "x")
    assert picture.pixels[:3] == bytes((255, 127, 155))


def test_grey_of_sixteen_bits_keeps_its_shades() -> None:
    shades = np.repeat(np.arange(20, dtype=np.uint16)[None] * 3000, 8, 0)
    picture = decode(file_of(Image.fromarray(shades)), GRID, MAX_PIXELS, "x")
    row = np.frombuffer(picture.pixels, np.uint8).reshape(8, 20, 3)[3]
    assert row[:, 0].tolist() == row[:, 2].tolist() == [shade * 3000 // 256 for shade in range(20)]


def test_an_image_in_a_grid_keeps_its_ratio() -> None:
    """Within bounds of pixels, and of its ratio, which is that of `transformers`."""
    assert [tiling(GRID, *size).sizes for size in ((20, 9), (3, 2), (80, 40))] == [((20, 8),), ((12, 8),), ((28, 12),)]
    picture = decode(file_of(colour(255, 20, 9)), GRID, MAX_PIXELS, "x")
    assert (picture.width, picture.height, len(picture.pixels)) == (20, 8, 20 * 8 * 3)
    assert placeholder(GRID, picture.cut) == "once" * 10
    assert refusal(file_of(colour(255, 401, 2)), GRID) == "invalid_image"


def test_an_image_without_a_cell_is_refused() -> None:
    assert refusal(file_of(colour(9, 1, 90)), msgspec.structs.replace(GRID, min_pixels=0)) == "invalid_image"


def test_a_border_makes_an_image_a_square() -> None:
    taken = msgspec.structs.replace(TAKEN, layout="square", shortest_edge=0, border=(0, 200, 0), tile_tokens=5, resample=0)
    picture = decode(file_of(colour(255, 16, 8)), taken, MAX_PIXELS, "x")
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(8, 8, 3)
    assert (
        pixels[2:6].tolist() == [[[255, 0, 0]] * 8] * 4 and pixels[:2].tolist() == pixels[6:].tolist() == [[[0, 200, 0]] * 8] * 2
    )
    assert placeholder(taken, picture.cut) == "once" * 5
    assert refusal(file_of(colour(255, 101, 2)), taken) == "image_too_large", "the square has more pixels"


def test_photos_are_turned_upright() -> None:
    image = Image.new("RGB", (16, 8))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = decode(file_of(image, exif=exif), TILED, MAX_PIXELS, "x")
    assert turned == decode(file_of(image.rotate(180)), TILED, MAX_PIXELS, "x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        b"<svg/>",
        file_of(colour(1))[:45],
        file_of(colour(1), "JPEG")[:200],
        file_of(colour(1), "BMP"),
        file_of(colour(1), exif=b"II*\0"),
    ],
    ids=["empty", "a header", "svg", "half a PNG", "half a JPEG", "BMP", "half an EXIF"],
)
def test_other_files_are_refused(content: bytes) -> None:
    assert refusal(content) == "invalid_image"


def test_bombs_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> Any:
        raise AssertionError("the pixels are decoded")

    content = bomb(20_000, 20_000)
    assert len(content) < 60_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert refusal(content) == "image_too_large"
    assert refusal(bomb(200, 51)) == "image_too_large"


def test_thin_images_may_not_grow_beyond_the_bound() -> None:
    assert refusal(file_of(colour(1, 9000, 1))) == "image_too_large"


def test_scans_of_a_jpeg_are_bounded() -> None:
    content = file_of(colour(1), "JPEG", progressive=True)
    decode(content, TAKEN, MAX_PIXELS, "x")
    assert 1 < num_scans(content) < 20
    scan = content[content.index(b"\xff\xda") : content.index(b"\xff\xda", content.index(b"\xff\xda") + 1)]
    assert refusal(content[:-2] + b"\xff" + scan * MAX_SCANS + content[-2:]) == "image_too_large"
    assert refusal(content[:2] + b"\xff\xfe\x00\x02" * MAX_SEGMENTS + content[2:]) == "image_too_large"


def test_a_jpeg_within_a_jpeg_is_not_counted() -> None:
    content = file_of(colour(1), "JPEG", progressive=True)
    other = (b"\xff\xda\x00\x02" * MAX_SCANS + content) * 2
    comment = b"\xff\xfe" + (2 + len(other)).to_bytes(2, "big") + other
    assert num_scans(content[:2] + comment + content[2:] + other) == num_scans(content)


def test_tiles_are_bounded() -> None:
    whole = msgspec.structs.replace(TILED, longest_edge=0)
    assert tiling(whole, 80, 80).num_tiles == 101
    assert refusal(file_of(colour(1, 80, 80)), whole) == "image_too_large"


def test_tiles_precede_the_whole_image() -> None:
    image = Image.new("RGB", (16, 8))
    image.paste((255, 0, 0), (0, 0, 8, 8))
    picture = decode(file_of(image), TILED, MAX_PIXELS, "x")
    tiles = np.frombuffer(picture.pixels, np.uint8).reshape(3, 8, 8, 3)
    assert (picture.cut.rows, picture.cut.columns) == (1, 2)
    assert tiles[0, ..., 0].min() == 255 and tiles[1].max() == 0 and 0 < tiles[2].mean() < 255
    text = placeholder(TILED, picture.cut)
    assert text.count(TILED.token) == 3 * TILED.tile_tokens and "<row_1_col_2>" in text


def test_memory_of_a_large_image_is_bounded(tmp_path: Path) -> None:
    """A process of its own: the most memory that a process has used never falls."""
    Image.new("RGBA", (5000, 5000)).save(tmp_path / "image", "WEBP", lossless=True, method=0)
    code = (
        "import pathlib, sys\n"
        "from PIL import Image\n"
        "from phalanx_frontend.images.decoding import decode\n"
        "from tests.frontend.images.pictures import TAKEN\n"
        "Image.init()\n"
        "content = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "def most(): return int(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
        "used = most()\n"
        "decode(content, TAKEN, 25_000_000, 'x')\n"
        "print(most() - used)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "image"], capture_output=True, text=True, check=True)
    assert 90 < int(run.stdout) / 1024 < 450, "MiB"


def test_equal_pixels_have_one_digest() -> None:
    lossless = [decode(file_of(colour(7), format, lossless=True), TAKEN, MAX_PIXELS, "x") for format in ("PNG", "WEBP")]
    assert lossless[0].digest == lossless[1].digest
    assert lossless[0].digest != decode(file_of(colour(8)), TAKEN, MAX_PIXELS, "x").digest


def test_bytes_after_the_image_are_ignored() -> None:
    content = file_of(colour(7))
    assert decode(content + b"more", TAKEN, MAX_PIXELS, "x") == decode(content, TAKEN, MAX_PIXELS, "x")
    assert Image.open(io.BytesIO(content)).size == (12, 9)
