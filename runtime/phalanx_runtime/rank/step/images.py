"""Embeddings of images in a step. Each image is encoded once, and kept while there is room."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.model.attention.step_embeddings import StepEmbeddings
from phalanx_runtime.model.copies.uploads import upload
from phalanx_runtime.model.protocol import ImageEncoder
from phalanx_runtime.rank.step.page_tables import Ints

CACHE_BYTES = 64 << 20
"""Of encoded images, beside that in use."""


class ImageCache:
    """Encoded images by scope and digest, the least recently used first: a tenant must not notice which images others send."""

    def __init__(self, encoder: ImageEncoder, max_bytes: int = CACHE_BYTES) -> None:
        self._encoder = encoder
        self.num_levels = encoder.num_levels
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._encoded: OrderedDict[tuple[bytes, bytes], Tensor] = OrderedDict()

    def get(self, scope: bytes, image: wire.Image) -> Tensor:
        """Returns the embeddings of an image, see `ImageEncoder`. `scope`: see `NewRow.image_scope`."""
        found = self._encoded.get((scope, image.digest))
        if found is not None:
            self._encoded.move_to_end((scope, image.digest))
            return found
        encoded = self._encoder.encode(image)
        self._encoded[scope, image.digest] = encoded
        self._num_bytes += encoded.nbytes
        while self._num_bytes > self._max_bytes and len(self._encoded) > 1:
            self._num_bytes -= self._encoded.popitem(last=False)[1].nbytes
        return encoded


Rows = Mapping[int, NewRow]
EmbedImages = Callable[[Rows, Ints, Ints, Ints], StepEmbeddings | None]
"""Returns the embeddings of the images within a step, if there are any.

The first position of each row, and the number of its tokens; requests are in packed order.
"""


def no_images(params: Rows, rows: Ints, starts: Ints, counts: Ints) -> None:
    """Returns nothing: the model reads text only, or an earlier stage embeds."""


def whole_images(params: Rows, rows: Ints, starts: Ints, counts: Ints) -> dict[int, list[range]]:
    """Returns, by row, the tokens of images that attend to each other, of those with tokens in the step."""
    found: dict[int, list[range]] = {}
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for image in params[row].images if row in params else ():
            for first, size in image.spans if image.attends_within else ():
                if first < start + count and first + size > start:
                    found.setdefault(row, []).append(range(first, first + size))
    return found


def without_pixels(new: NewRow, end: int) -> NewRow:
    """Returns a row without the pixels of images before position `end`."""
    if not any(image.pixels and image.stop <= end for image in new.images):
        return new
    return replace(new, images=[replace(image, pixels=b"") if image.stop <= end else image for image in new.images])


def forget_pixels(params: MutableMapping[int, NewRow], rows: Ints, ends: Ints) -> None:
    """Drops the pixels of images whose tokens are computed up to `ends`: else a row keeps them until it gets another request.

    A row whose tokens must be computed again is admitted again.
    """
    for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
        if row in params:
            params[row] = without_pixels(params[row], end)


def step_embeddings(images: ImageCache, params: Rows, rows: Ints, starts: Ints, counts: Ints) -> StepEmbeddings | None:
    """Implements `EmbedImages` with these images."""
    tokens, values, first = list[int](), list[Tensor](), 0
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for image in params[row].images:
            within = image.start < start + count and image.stop > start
            parts = _parts(image, range(start, start + count)) if within else []
            if parts:
                encoded = images.get(params[row].image_scope, image)
                tokens += [first + position - start for positions, _ in parts for position in positions]
                values += [encoded[offset : offset + len(positions)] for positions, offset in parts]
        first += count
    if not tokens:
        return None
    joined, *deeper = torch.cat(values).chunk(images.num_levels, -1)
    return StepEmbeddings(upload([np.asarray(tokens, np.int64)], joined.device)[0], joined, tuple(deeper))


def _parts(image: wire.Image, positions: range) -> list[tuple[range, int]]:
    """Returns the runs of an image's tokens within `positions`, each with the index of its first token in the image."""
    parts, index = list[tuple[range, int]](), 0
    for start, count in image.spans:
        low, high = max(start, positions.start), min(start + count, positions.stop)
        if low < high:
            parts.append((range(low, high), index + low - start))
        index += count
    return parts
