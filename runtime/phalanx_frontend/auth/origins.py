"""Origins of web pages whose scripts may read responses (CORS).

A browser asks by a preflight (OPTIONS), which has no key, so it is answered outside of authentication. Errors have the
headers too.
"""

import argparse
import json
import re

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

EXPOSED_HEADERS = ("x-request-id", "request-id", "x-phalanx-cache", "retry-after", "retry-after-ms", "traceparent")
"""Headers of responses that scripts may read, besides those that every script may."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = (("https://", ":443"), ("http://", ":80"))


def origins(text: str) -> tuple[str, ...]:
    """Returns the origins of a list with commas or, as vLLM takes it, in JSON. Raises ArgumentTypeError for one that is none.

    They are as browsers send them: in lower case, without the default port.
    """
    return tuple(dict.fromkeys(_origin(entry.strip()) for entry in _entries(text) if entry.strip()))


def _entries(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of origins: {error}") from error
    if not all(isinstance(entry, str) for entry in entries):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of origins: they are texts")
    return list(entries)


def _origin(text: str) -> str:
    origin = text.lower()
    if not _ORIGIN.fullmatch(origin):
        raise argparse.ArgumentTypeError(f"{text!r} is no origin: use *, or scheme://host or scheme://host:port without a path")
    for scheme, port in _DEFAULT_PORTS:
        if origin.startswith(scheme):
            origin = origin.removesuffix(port)
    return origin


def add_origin_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag."""
    parser.add_argument(
        "--allowed-origins",
        type=origins,
        default=(),
        metavar="ORIGIN,...",
        help="origins of web pages that may call the API from browsers, such as https://chat.example; *: all (default: none)",
    )


def with_origins(app: ASGIApp, allowed: tuple[str, ...]) -> ASGIApp:
    """Returns the app, with answers to preflights and headers of CORS if there are origins.

    Without credentials, which are cookies here: keys are in headers that the page sets.
    """
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
    )
