"""Reads the images of a request: from data: URLs, and over https from the hosts that are allowed."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote_to_bytes

from phalanx_api import wire
from phalanx_frontend.images.budget import ImageBudget, current_lease
from phalanx_frontend.images.decoding import Picture, decode
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.parts import ImagePart
from phalanx_frontend.images.slots import DecodeSlots

MAX_CONCURRENT = 2
"""Images that one process decodes at once: each takes some bytes per pixel."""


@dataclass(frozen=True, slots=True)
class ImageBounds:
    """Bounds of the images of one request."""

    max_images: int = 16
    max_bytes: int = 20 * 1024 * 1024  # of the file of one image
    max_pixels: int = 25_000_000  # of one image, also when it is resized
    max_tile_bytes: int = wire.MAX_PIXEL_BYTES  # of the tiles of all images, which requests carry


class ImageFetcher(Protocol):
    """Reads files over https."""

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """Returns the file, whose bytes it takes from the `current_lease`. Raises ImageRefused that names `param`."""
        ...


class NoFetcher:
    """Refuses all URLs."""

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """Raises ImageRefused."""
        why = "this server fetches no images: send a data: URL, or let it be started with --allowed-media-domains"
        raise ImageRefused(param, f"{param}: {why}", "image_url_refused")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Reads images of requests."""

    bounds: ImageBounds = ImageBounds()
    fetcher: ImageFetcher = field(default_factory=NoFetcher)
    budget: ImageBudget = field(default_factory=ImageBudget)
    _slots: DecodeSlots = field(default_factory=lambda: DecodeSlots(MAX_CONCURRENT))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MAX_CONCURRENT, "images"))

    def check_number(self, count: int, param: str) -> None:
        """Raises ImageRefused for more images than a request may have."""
        if count > self.bounds.max_images:
            raise ImageRefused(param, f"one request may have at most {self.bounds.max_images} images", "too_many_images")

    async def read(self, parts: Sequence[tuple[str, ImagePart]], taken: wire.ImageInput) -> list[Picture]:
        """Returns the images in order; reads them at once. `parts`: with their fields. Raises ImageRefused, NoImageMemory."""
        sizes = list[int]()

        async def one(param: str, url: str) -> Picture:
            picture = await self._read(url, taken, param)
            sizes.append(len(picture.pixels))
            if sum(sizes) > self.bounds.max_tile_bytes:
                why = f"{param}: the images of the request have too many pixels: send fewer"
                raise ImageRefused(param, why, "image_too_large")
            current_lease().take(len(picture.pixels))
            return picture

        tasks = [asyncio.ensure_future(one(param, part.url)) for param, part in parts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, url: str, taken: wire.ImageInput, param: str) -> Picture:
        scheme, bounds = url[:8].partition(":")[0].lower(), self.bounds
        if scheme not in ("data", "https"):
            raise ImageRefused(param, f"{param}: the URL of an image must begin with data: or https:", "image_url_refused")
        fetched = await self.fetcher.fetch(url, bounds.max_bytes, param) if scheme == "https" else None

        def decoded() -> Picture:
            content = data_of(url, param) if fetched is None else fetched
            if len(content) > bounds.max_bytes:
                raise ImageRefused(param, f"{param}: the image has more than {bounds.max_bytes} bytes", "image_too_large")
            return decode(content, taken, bounds.max_pixels, param)

        async with self._slots.held(current_lease().tenant):
            picture = await asyncio.get_running_loop().run_in_executor(self._threads, decoded)
        if fetched is not None:
            current_lease().give_back(len(fetched))
        return picture


def data_of(url: str, param: str) -> bytes:
    """Returns the content of a data: URL (RFC 2397). Raises ImageRefused."""
    head, comma, content = url[5:].partition(",")
    if not comma:
        raise ImageRefused(param, f"{param}: the data: URL has no comma", "invalid_image")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused(param, f"{param}: the data: URL has no valid base64", "invalid_image") from error
