"""Images of prompts: how a model takes them, and their pixels in a request."""

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

IMAGES_FILE = "images.json"
"""File of `Assets` with an encoded `ImageInput`; absent if the model reads text only."""
ImageLayout = Literal["whole", "tiles", "grid", "rows", "padded", "cut", "reduced", "square"]
"""whole: an image becomes one tile, which those of its crops may follow. tiles: it is cut into tiles, after which it follows in
one tile. grid: it keeps its ratio in one tile of its own size, with a token for each cell of `height` x `width` pixels. rows:
as grid, with text between the rows of tokens. padded: it is one tile, before tiles of the image with a border of black pixels,
whose cells have no tokens. reduced: as padded, but the cells of a large image are interpolated to fewer. square: it gets a
border that makes it a square, which becomes one tile. cut: it is resized to a grid of tiles with about its ratio, after which
it follows in one tile; all their tokens are consecutive."""
MAX_TILE_EDGE = 4096
MAX_PIXEL_BYTES = 64 << 20
"""Of the tiles of all images of a request."""
_IS_NUMBER = 1 << 62
"""Above all token ids."""


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """How images become tokens of the prompt, and tiles of pixels."""

    layout: ImageLayout
    token: str  # text of a placeholder, as the chat template writes one for each image
    token_id: int
    tile_tokens: int  # placeholders of one tile; grid: of one cell
    height: int  # of a tile, in pixels; grid: of a cell
    width: int
    resample: int  # filter, as Pillow numbers them
    shortest_edge: int = 0  # whole: the image is resized to it and cropped in the centre; 0: resized to one tile
    longest_edge: int = 0  # tiles: the image is resized to it first; 0: it is not
    is_split: bool = True  # tiles: false leaves the image in one tile
    obstacle: str = ""  # why the model takes no images after all, for the client
    run_token: str = ""  # text of each placeholder in the prompt, if it is not `token`
    before: str = ""  # text around the placeholders of an image
    after: str = ""
    attends_within: bool = False  # the tokens of an image attend to each other
    min_pixels: int = 0  # grid: of a resized image
    max_pixels: int = 0
    row_end: str = ""  # rows: text after each row of placeholders except the last, which `after` follows
    resolutions: list[tuple[int, int]] = []  # padded, reduced: (height, width) of the image with its border, one of these
    max_cells: int = 0  # reduced: an image with more than 1.21 times as many, without its border, is scaled down to these
    border: tuple[int, int, int] = (0, 0, 0)  # square: its colour
    several: "ImageInput | None" = None  # how each image is taken if a conversation has several; null: as one alone
    max_crops: int = 0  # whole: of a long image; 0: it has none
    min_crop_edge: int = 0
    min_crop_ratio: float = 0.0  # of the longer edge to the other one
    min_tiles: int = 0  # cut: tiles of the grid
    max_tiles: int = 0

    def among(self, count: int) -> "ImageInput":
        """Returns how each image is taken in a conversation with `count` images."""
        return self.several if self.several is not None and count > 1 else self

    def is_spelled(self, text: str) -> bool:
        """Returns whether a text has a placeholder."""
        return any(name in text for name in (self.token, self.run_token) if name)


def refused_images(why: str) -> ImageInput:
    """Returns the input of a model that takes no images after all."""
    return ImageInput(layout="whole", token="", token_id=0, tile_tokens=1, height=1, width=1, resample=0, obstacle=why)


class Image(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An image of a prompt: its tiles in order, each `height` rows of `width` pixels of three bytes."""

    digest: bytes  # of its pixels: requests with equal digests and tokens share pages
    num_tiles: int
    height: int
    width: int
    pixels: bytes
    spans: list[tuple[int, int]]  # (start, count): its placeholder tokens in the prompt, ascending
    attends_within: bool = False  # the tokens of a span attend to each other, so that one step computes them
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, if their positions are those of cells
    size: tuple[int, int] | None = None  # (height, width) before it was resized, if its tokens depend on that

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """Position after its last token."""
        start, count = self.spans[-1]
        return start + count

    @property
    def shift(self) -> int:
        """How much smaller the positions of later tokens are than without an image: a grid has as many as its longer edge."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1] - max(self.grid)

    @property
    def work(self) -> int:
        """Tiles that take about as long to encode."""
        return max(self.num_tiles, len(self.pixels) >> 21)


def image_digest(pixels: bytes, num_tiles: int, height: int, width: int, size: tuple[int, int] | None = None) -> bytes:
    """Returns the digest of an image's tiles, and of its `size`."""
    shape = (num_tiles, height, width, *(size or ()))
    digest = hashlib.blake2b(b"".join(b"%d " % number for number in shape), digest_size=16, person=b"phalanx image")
    digest.update(pixels)
    return digest.digest()


def placeholder_numbers(images: Sequence[Image]) -> dict[int, int]:
    """Returns what distinguishes the tokens of images where pages are compared by tokens: a number by position, of no token.

    Two placeholders in a row have 124 bits of the digest.
    """
    numbers: dict[int, int] = {}
    for image in images:
        halves = [_IS_NUMBER | int.from_bytes(image.digest[at : at + 8], "little") >> 2 for at in (0, 8)]
        positions = (position for start, count in image.spans for position in range(start, start + count))
        numbers |= {position: halves[index % 2] for index, position in enumerate(positions)}
    return numbers


def whole_tokens(images: Sequence[Image]) -> int:
    """Returns the most tokens that attend to each other; 0 if none do."""
    return max((count for image in images if image.attends_within for _, count in image.spans), default=0)


def page_marks(images: Sequence[Image]) -> list[tuple[int, bytes]]:
    """Returns what page keys depend on beside the tokens: (position of the first token, digest) of each image."""
    return [(image.start, image.digest) for image in images]
