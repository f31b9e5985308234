"""Bounds of frames between router and leader."""

import json

from phalanx_api import wire
from phalanx_frontend.images.source import ImageBounds
from phalanx_frontend.limits import DEFAULT_LIMITS
from phalanx_router.links.connection import MAX_FRAME_BYTES
from phalanx_runtime.server.pod_server import LINK_FRAME_BYTES

MAX_CONTEXT = 1 << 20


def test_the_largest_request_fits_a_frame() -> None:
    """As many pixels as a request may have, a long context, and in the rest of its body token ids or a text that is escaped."""
    tiles = bytes(ImageBounds().max_tile_bytes)
    image = wire.Image(digest=bytes(16), num_tiles=64, height=1, width=1, pixels=tiles, spans=[(0, 1)])
    ids = [99_999] * (DEFAULT_LIMITS.max_body_bytes // len("99999,"))
    grammar = wire.Grammar("json_schema", json.dumps("é" * (DEFAULT_LIMITS.max_body_bytes // 2)))
    for fields in ({"allowed_token_ids": ids}, {"grammar": grammar}):
        sampling = wire.Sampling(max_tokens=1, seed=0, **fields)
        tokens = [1 << 17] * MAX_CONTEXT
        request = wire.Request(id="a", epoch=0, prompt=tokens, delivered=tokens, sampling=sampling, images=[image])
        assert len(wire.encode(wire.Submit(1, request))) < LINK_FRAME_BYTES <= MAX_FRAME_BYTES
