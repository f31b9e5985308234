"""Reads small JSON bodies of requests outside of the OpenAI API."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from phalanx_frontend.errors import ApiError

T = TypeVar("T")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body. Raises ApiError 413 beyond `max_bytes`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is longer than {max_bytes} bytes", code="request_too_large")
    return bytes(body)


def decode_body(decode: Callable[[bytes], T], body: bytes, name: str) -> T:
    """Returns the decoded body. Raises ApiError 400 that says the body is not `name`."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter: a string that is not UTF-8
        raise ApiError(400, f"the body is not {name}: {error}") from error
