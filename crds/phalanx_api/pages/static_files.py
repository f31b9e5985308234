"""The files of a page, read once, and its headers."""

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PATH = "/ui"
API = f"{PATH}/api/"
INDEX = "index.html"
_LINK = re.compile(rb'(src|href)="(?!#)')
"""Links of the index to its folder. They are relative, because an Ingress may serve all paths below one of its own."""
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str
    etag: str


def static_files(package: str) -> dict[str, StaticFile]:
    """Returns the files of a page by path of a request: those in the folder `static` of a package, and the shared ones."""
    found = _files(__package__) | _files(package)
    index = found[f"{PATH}/"] = found[f"{PATH}/{INDEX}"]
    found[PATH] = _file(_LINK.sub(rb'\1="ui/', index.content), index.media_type)
    return found


def _files(package: str) -> dict[str, StaticFile]:
    found = {}
    for file in files(package).joinpath("static").iterdir():
        media_type = TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            found[f"{PATH}/{file.name}"] = _file(file.read_bytes(), media_type)
    return found


def _file(content: bytes, media_type: str) -> StaticFile:
    return StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
