"""Embeddings of images in a step: rows of each chunk, and encoded images that are kept."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.images import NEEDED_USES, EmbedImages, ImageCache, kept_bytes, no_images, step_embeddings
from phalanx_runtime.rank.step.page_tables import CacheShape, Ints

SAMPLING = wire.Sampling(max_tokens=1, seed=0)


def image(name: bytes, spans: Sequence[tuple[int, int]]) -> wire.Image:
    return wire.Image(digest=name, num_tiles=1, height=1, width=1, pixels=b"", spans=list(spans))


class Counting:
    """Encodes each image as 100 times its first letter, and the number of the token."""

    num_levels, request_bytes = 1, 8 * 9

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def blank(self) -> wire.Image:
        raise AssertionError("nothing is measured")

    def peak_bytes(self, measured: int) -> int:
        return measured

    def encode(self, image: wire.Image) -> Tensor:
        self.encoded.append(image.digest)
        count = sum(count for _, count in image.spans)
        return torch.arange(count, dtype=torch.float64)[:, None] + 100 * image.digest[0]


FIRST, SECOND = image(b"\x01", [(2, 3), (7, 2)]), image(b"\x02", [(0, 4)])
ROWS = {4: NewRow(4, SAMPLING, images=[FIRST]), 5: NewRow(5, SAMPLING, images=[SECOND]), 6: NewRow(6, SAMPLING)}


def embeddings(cache: ImageCache, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """Returns the value of each token that has one, by index in the step."""
    arrays = [np.asarray(values, np.int64) for values in (rows, starts, counts)]
    found = step_embeddings(cache, ROWS, *arrays)
    return {} if found is None else dict(zip(found.tokens.tolist(), found.values[:, 0].int().tolist(), strict=True))


def test_each_chunk_gets_its_part_of_the_images() -> None:
    cache = ImageCache(Counting())
    whole = embeddings(cache, [6, 4, 5], [3, 0, 0], [2, 10, 5])
    assert whole == {4: 100, 5: 101, 6: 102, 9: 103, 10: 104, 12: 200, 13: 201, 14: 202, 15: 203}
    parts = [embeddings(cache, [4], [start], [2]) for start in range(0, 10, 2)]
    assert parts == [{}, {0: 100, 1: 101}, {0: 102}, {1: 103}, {0: 104}]


def test_an_image_is_encoded_once_and_only_when_needed() -> None:
    encoder = Counting()
    cache = ImageCache(encoder)
    assert embeddings(cache, [4, 6], [9, 0], [3, 3]) == {}
    assert embeddings(cache, [4], [5], [2]) == {}, "text between two tiles"
    assert encoder.encoded == []
    for start in range(10):
        embeddings(cache, [4], [start], [1])
    assert encoder.encoded == [FIRST.digest]


def test_the_least_recently_used_image_is_dropped() -> None:
    encoder = Counting()
    cache = ImageCache(encoder, max_bytes=8 * 9)
    names = [b"\x01", b"\x02", b"\x01", b"\x03", b"\x01", b"\x02"]
    for name in names:
        cache.get(b"", image(name, [(0, 4)]))
    assert encoder.encoded == [b"\x01", b"\x02", b"\x03", b"\x02"]


def test_an_image_larger_than_the_bound_is_usable() -> None:
    cache = ImageCache(Counting(), max_bytes=1)
    assert len(cache.get(b"", image(b"\x01", [(0, 40)]))) == 40


def test_an_image_is_kept_until_its_last_chunk() -> None:
    """Two requests take turns; there is room for one image."""
    encoder = Counting()
    cache = ImageCache(encoder, max_bytes=8 * 5)
    for step in range(7):
        embeddings(cache, [4], [2 + step], [1])
        embeddings(cache, [5], [step], [1])
    assert encoder.encoded.count(FIRST.digest) == 1
    encoder.encoded.clear()
    for start in range(4):
        embeddings(cache, [5], [start], [1])
    assert encoder.encoded == [SECOND.digest], "the other one is not needed any more"


def test_an_image_of_an_ended_request_is_dropped() -> None:
    encoder = Counting()
    cache = ImageCache(encoder, max_bytes=8 * 5)
    embeddings(cache, [4], [0], [3])
    for _ in range(NEEDED_USES + 2):
        embeddings(cache, [5], [0], [1])
    assert encoder.encoded.count(SECOND.digest) == NEEDED_USES + 1


def test_an_image_without_room_drops_no_other() -> None:
    encoder = Counting()
    cache = ImageCache(encoder, max_bytes=8 * 9)
    unneeded, needed, large = (image(name, [(0, size)]) for name, size in ((b"\x01", 4), (b"\x02", 4), (b"\x03", 6)))
    cache.get(b"", unneeded)
    cache.get(b"", needed, is_needed=True)
    cache.get(b"", large)
    cache.get(b"", unneeded)
    assert encoder.encoded == [b"\x01", b"\x02", b"\x03"]


def test_the_images_of_a_request_have_room() -> None:
    encoder = Counting()
    assert kept_bytes(encoder) == 64 << 20
    encoder.request_bytes = 1 << 30
    assert kept_bytes(encoder) == 1 << 30


def test_tenants_share_no_encoded_image() -> None:
    encoder = Counting()
    cache = ImageCache(encoder)
    values = [cache.get(scope, FIRST)[0].item() for scope in (b"alice", b"bob", b"alice")]
    assert values == [100, 100, 100] and encoder.encoded == [FIRST.digest] * 2


def embed_nothing(params: Mapping[int, NewRow], rows: Ints, starts: Ints, counts: Ints) -> None:
    """A tower that computes nothing."""


@pytest.mark.parametrize(("embed", "expected"), [(embed_nothing, [6, 3, 0]), (no_images, [0, 0, 0])])
def test_a_row_keeps_no_pixels_of_computed_images(embed: EmbedImages, expected: list[int]) -> None:
    """The first stage needs them until it has computed the tokens, other ranks and draft models never."""
    images = [msgspec.structs.replace(image(b"i", spans), pixels=b"abc") for spans in ([(2, 3), (7, 2)], [(9, 4)])]
    builder, left = BatchBuilder(CacheShape(4, 1, 1), torch.float32, torch.device("cpu"), embed=embed), list[int]()
    new = NewRow(3, SAMPLING, 14, images=images)
    plan = StepPlan(step=1, admitted=[new], rows=[], starts=[], counts=[], pages=[], tokens=[], draws=[])
    builder.update(plan)
    for start, count in ((0, 8), (8, 3), (11, 2)):
        pages = [] if start else [0, 1, 2, 3]
        fields = {"admitted": [], "rows": [3], "starts": [start], "counts": [count], "pages": [pages], "tokens": [0] * count}
        builder.build(msgspec.structs.replace(plan, **fields))
        left.append(sum(len(one.pixels) for one in builder.params[3].images))
    assert left == expected
    assert [one.spans for one in builder.params[3].images] == [one.spans for one in images], "for positions and masks"
