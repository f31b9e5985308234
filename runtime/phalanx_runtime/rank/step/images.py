"""Embeddings of images in a step. Each image is encoded once, and kept while there is room.

There is room for the images of one request at least: as long as its later chunks need one, no other image takes its place.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.model.attention.step_inputs import StepEmbeddings
from phalanx_runtime.model.copies import upload
from phalanx_runtime.model.protocol import ImageEncoder
from phalanx_runtime.rank.step.page_tables import Ints

MIN_CACHE_BYTES = 64 << 20
"""Of encoded images."""
NEEDED_USES = 64
"""Uses of other images after which one that a later chunk needs may be dropped too: its request may have ended."""


def kept_bytes(encoder: ImageEncoder) -> int:
    """Returns the most bytes of encoded images that are kept."""
    return max(MIN_CACHE_BYTES, encoder.request_bytes)


class ImageCache:
    """Encoded images by scope and digest, the least recently used first: a tenant must not notice which images others send."""

    def __init__(self, encoder: ImageEncoder, max_bytes: int | None = None) -> None:
        """`max_bytes`: `kept_bytes` by default."""
        self._encoder = encoder
        self.num_levels = encoder.num_levels
        self._max_bytes = kept_bytes(encoder) if max_bytes is None else max_bytes
        self._num_bytes = 0
        self._num_uses = 0
        self._encoded: OrderedDict[tuple[bytes, bytes], Tensor] = OrderedDict()
        self._needed_until: dict[tuple[bytes, bytes], int] = {}

    def get(self, scope: bytes, image: wire.Image, *, is_needed: bool = False) -> Tensor:
        """Returns the embeddings of an image, see `ImageEncoder`.

        `scope`: see `NewRow.image_scope`; `is_needed`: a later chunk has tokens of the image.
        """
        key = scope, image.digest
        self._num_uses += 1
        found = self._encoded.pop(key, None)
        if found is None:
            found = self._encoder.encode(image)
            if not self._has_room(found.nbytes):
                return found
            self._num_bytes += found.nbytes
        self._encoded[key] = found  # the last one
        self._needed_until[key] = self._num_uses + NEEDED_USES if is_needed else 0
        return found

    def _has_room(self, num_bytes: int) -> bool:
        """Returns whether there is room for another image, for which images that no later chunk needs are dropped."""
        unneeded = [key for key in self._encoded if self._needed_until[key] < self._num_uses]
        needed_bytes = self._num_bytes - sum(self._encoded[key].nbytes for key in unneeded)
        if needed_bytes + num_bytes > self._max_bytes:
            return False
        for key in unneeded:
            if self._num_bytes + num_bytes <= self._max_bytes:
                break
            self._num_bytes -= self._encoded.pop(key).nbytes
            del self._needed_until[key]
        return True


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
                encoded = images.get(params[row].image_scope, image, is_needed=image.stop > start + count)
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
