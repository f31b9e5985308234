"""Reads the images of a request: from data: URLs, and over https from the hosts that are allowed. The flag of those hosts."""

import argparse
import asyncio
import base64
import binascii
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from urllib.parse import unquote_to_bytes

from phalanx_api import wire
from phalanx_frontend.images.budget import MAX_BYTES, current_lease
from phalanx_frontend.images.decoding import Picture, decode
from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.fetching import AllowedHosts, HttpsFetcher
from phalanx_frontend.images.parts import ImagePart
from phalanx_frontend.limits import MemoryBudget

MAX_CONCURRENT = 2
"""Images that one process decodes at once: each takes some bytes per pixel."""
_ENTRY = re.compile(r"\*|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]+(/[0-9]{1,3})?")


class DecodeSlots:
    """Slots to decode an image, in the order of arrival, but tenants without a slot first. Of one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._held = Counter[str]()
        self._waiting = deque[tuple[str, asyncio.Future[None]]]()

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot for a tenant, once it has one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, turn))
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_free += 1
                self._held[tenant] -= 1
                self._held += Counter()  # without those at 0
            self._grant()

    def _grant(self) -> None:
        """Gives free slots to those who wait and were not cancelled."""
        self._waiting = deque(one for one in self._waiting if not one[1].done())
        while self._num_free and self._waiting:
            tenant, turn = next((one for one in self._waiting if not self._held[one[0]]), self._waiting[0])
            self._waiting.remove((tenant, turn))
            self._num_free -= 1
            self._held[tenant] += 1
            turn.set_result(None)


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
    budget: MemoryBudget = field(default_factory=partial(MemoryBudget, MAX_BYTES))
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
    """Returns the content of a data: URL (RFC 2397). Raises ImageRefused.

    Base64 may have line breaks and spaces, and lack its padding, as for browsers (WHATWG, forgiving-base64 decode).
    """
    head, comma, content = url[5:].partition(",")
    if not comma:
        raise ImageRefused(param, f"{param}: the data: URL has no comma", "invalid_image")
    plain = unquote_to_bytes(content)
    if not head.replace(" ", "").lower().endswith(";base64"):
        return plain
    digits = plain.translate(None, b" \t\r\n\f").rstrip(b"=")
    try:
        return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageRefused(param, f"{param}: the data: URL has no valid base64", "invalid_image") from error


def image_hosts(text: str) -> tuple[str, ...]:
    """Returns the entries of a list with commas. Raises ArgumentTypeError for one that is no host."""
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise argparse.ArgumentTypeError(f"{entry!r} is no host name, *.suffix, address or network")
    return entries


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--allowed-media-domains",
        type=image_hosts,
        default=(),
        metavar="HOST,...",
        help="hosts of images by https: names, *.suffix or * for public addresses, networks for others (default: none)",
    )


def image_source(hosts: tuple[str, ...]) -> ImageSource:
    """Returns the source of images from these hosts."""
    return ImageSource(fetcher=HttpsFetcher(AllowedHosts(hosts)) if hosts else NoFetcher())
