"""The files of the page, read once."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PATH = "/ui"
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str
    etag: str


def static_files() -> dict[str, StaticFile]:
    """Returns the files by path of a request."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        media_type = TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[f"{PATH}/{file.name}"] = StaticFile(content, media_type, etag)
    found[PATH] = found[f"{PATH}/"] = found[f"{PATH}/{INDEX}"]
    return found
