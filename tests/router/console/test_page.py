"""The static part of the consoles: open to all, strict headers, small, and complete without any other server."""

import re
from pathlib import Path

import pytest

from phalanx_api.pages.static_files import static_files
from phalanx_frontend.images.source import ImageBounds
from phalanx_frontend.limits import DEFAULT_LIMITS
from tests.router.console.consoles import KEYS, leaders, running_console

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "phalanx_router/console": ROOT / "runtime/phalanx_router/console/static",
    "phalanx_operator/console": ROOT / "operator/phalanx_operator/console/static",
    "phalanx_api/pages": ROOT / "crds/phalanx_api/pages/static",
}
FILES = [file for folder in FOLDERS.values() for file in sorted(folder.iterdir())]
MAX_BYTES = 500_000


async def test_page_needs_no_key_and_has_strict_headers() -> None:
    async with running_console(*leaders(None), keys=KEYS) as console:
        for path in ("/ui", "/ui/", "/ui/index.html"):
            page = await console.get(path)
            assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
            assert page.headers["x-content-type-options"] == "nosniff"
        again = await console.get(path, **{"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        absent = await console.get("/ui/absent.js")
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
        assert (await console.http.post("/ui")).json()["error"]["code"] == "method_not_allowed"


async def test_without_the_flag_there_is_no_console() -> None:
    async with running_console(*leaders(None), has_console=False) as console:
        for path in ("/ui", "/ui/index.html", "/ui/api/fleet"):
            assert (await console.get(path)).status_code == 404
        assert console.fleet.request_log is None
        assert "data:" in await console.complete("hello")


def test_page_is_small() -> None:
    assert sum(file.stat().st_size for file in FILES) < MAX_BYTES
    for package in ("phalanx_router/console", "phalanx_operator/console"):
        names = [file.name for folder in (FOLDERS[package], FOLDERS["phalanx_api/pages"]) for file in folder.iterdir()]
        found = static_files(package.replace("/", "."))
        assert found.keys() == {f"/ui/{name}" for name in names} | {"/ui", "/ui/"}
        assert len(names) == len(set(names))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parts[-3]}/{file.name}")
def test_file_names_no_other_server(file: Path) -> None:
    text = file.read_text()
    assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text.replace("http://www.w3.org/2000/svg", ""))
    if file.suffix == ".html":
        assert not re.findall(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", text), "the policy forbids inline code"


def test_page_bounds_images_as_the_api_does() -> None:
    script = (FOLDERS["phalanx_router/console"] / "images.js").read_text()
    found = re.search(r"MAX_IMAGES = (\d+), MAX_BYTES = (\d+) \* 2 \*\* 20", script)
    assert found is not None
    max_images, max_bytes = int(found[1]), int(found[2]) << 20
    assert (max_images, max_bytes) == (ImageBounds().max_images, ImageBounds().max_bytes)
    assert max_bytes * 4 // 3 + (1 << 20) < DEFAULT_LIMITS.max_body_bytes, "base64 and the rest of the body fit"
