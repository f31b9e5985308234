"""Image files, a model that takes images, and its assets."""

import base64
import io
import struct
import zlib
from typing import Any

import msgspec
from PIL import Image

from phalanx_api import wire
from tests.frontend.fakes import tiny_assets, token_ids

TAKEN = wire.ImageInput(
    layout="whole", token="once", token_id=token_ids("once")[0], tile_tokens=4, height=8, width=8, resample=3, shortest_edge=8
)
"""Its placeholder is a word that is one token."""
TILED = msgspec.structs.replace(TAKEN, layout="tiles", shortest_edge=0, longest_edge=16)
PARTS_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}:{% for part in message.content %}"
    "{{ 'once' if part.type == 'image' else part.text }}{% endfor %}]{% endfor %}"
)


def image_assets(taken: wire.ImageInput = TAKEN, chat_template: str = PARTS_TEMPLATE, **fields: Any) -> wire.Assets:
    """Returns the assets of a model that takes images, with a chat template that reads parts."""
    assets = tiny_assets(chat_template=chat_template, **fields)
    files = assets.files | {wire.IMAGES_FILE: msgspec.json.encode(taken)}
    return wire.make_assets(files, assets.served_names, assets.max_model_len, assets.eos_token_ids)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Returns an image file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def colour(red: int, width: int = 12, height: int = 9) -> Image.Image:
    """Returns an image of one colour."""
    return Image.new("RGB", (width, height), (red, 0, 0))


def url_of(content: bytes) -> str:
    """Returns a file as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def bomb(width: int, height: int) -> bytes:
    """Returns a PNG of some kilobytes that declares, and has, this many pixels of one bit."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressor = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
