"""Routers behind an Ingress whose path several services share."""

import os
import re
import signal
from urllib.parse import urljoin

import httpx
import pytest
from starlette.routing import BaseRoute

from phalanx_api import labels
from phalanx_api.pages.static_files import PATH as CONSOLE_PATH
from phalanx_api.summary import SUMMARY_PATH
from phalanx_router.app import make_router
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.root_path import RootPathMiddleware, below_root
from tests.router.console.consoles import leaders, running_console
from tests.router.fakes import make_settings
from tests.router.programs import program, read

ROOT = "/team/chat"


async def test_paths_are_served_with_and_without_the_root(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--lame-duck-s", "0", "--drain-s", "0", "--root-path", ROOT, "--api-key", "sk-1", "--console")
    async with program(token_file, caplog, *flags) as (url, leader, serving):
        leader.release()
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as http:
            key = {"authorization": "Bearer sk-1"}
            for root in ("", ROOT):
                assert (await http.get(f"{root}/healthz")).status_code == 200, "open to all"
                assert (await http.get(f"{root}/v1/models")).status_code == 401, "the root opens no path"
                assert (await http.get(f"{root}/v1/models", headers=key)).json()["data"]
                assert (await http.get(f"{root}/ui")).headers["content-type"].startswith("text/html")
                body = {"prompt": "hello", "max_tokens": 9, "stream": True}
                async with http.stream("POST", f"{root}/v1/completions", json=body, headers=key) as answer:
                    assert answer.status_code == 200
                    assert [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"
            for path in (ROOT, f"{ROOT}/", f"{ROOT}x/v1/models", f"{ROOT}{ROOT}/v1/models", "/team/v1/models"):
                assert (await http.get(path, headers=key)).status_code == 404
            for path in (f"{ROOT}/v1/models/", "/v1/models/"):
                assert (await http.get(path, headers=key)).status_code == 404, "a redirect would leave the root"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0


@pytest.mark.parametrize("root", ["", ROOT])
@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/index.html", "/docs", "/redoc"])
async def test_links_of_pages_stay_below_the_root(root: str, path: str) -> None:
    async with running_console(*leaders(None), root=root) as console:
        page = await console.http.get(root + path)
        assert page.status_code == 200
        links = re.findall(r"""(?:src=|href=|spec-url=|url: )["'](?!#)([^"']*)""", page.text)
        found = [url for link in links if (url := urljoin(str(page.url), link)).startswith(str(console.http.base_url))]
        assert found and {(await console.http.get(url)).status_code for url in found} == {200}
        assert all(url.startswith(f"{str(console.http.base_url).rstrip('/')}{root}/") for url in found)


async def test_without_a_root_nothing_changes() -> None:
    app, _ = make_router(make_settings(), StaticLeaders(("a:1",)))
    assert below_root(app, "") is app and app.router.redirect_slashes
    assert isinstance(below_root(app, ROOT), RootPathMiddleware)


def paths_of(routes: list[BaseRoute]) -> set[str]:
    """Returns the paths of an application."""
    found: set[str] = set()
    for route in routes:
        inner = getattr(route, "original_router", None)
        found |= paths_of(inner.routes) if inner is not None else {str(getattr(route, "path", ""))}
    return found


def test_no_root_is_a_path_of_routers() -> None:
    app, _ = make_router(make_settings(), StaticLeaders(("a:1",)))
    paths = paths_of(app.routes) | {CONSOLE_PATH, SUMMARY_PATH, "/docs", "/redoc", "/openapi.json"}
    assert {"/v1/models", "/healthz", "/tokenize"} <= paths
    assert [path for path in paths if not re.fullmatch(labels.OWN_PATH, path)] == []


@pytest.mark.parametrize(
    ("text", "root"), [("", ""), ("/", ""), ("/a", "/a"), ("/v1x", "/v1x"), ("/a/v1", "/a/v1"), (ROOT, ROOT)]
)
def test_a_root_is_read(token_file: str, text: str, root: str) -> None:
    assert read(token_file, "--leaders", "a:1", "--root-path", text).root_path == root


@pytest.mark.parametrize("text", ["a", "/a/", "//a", "/a/../b", "/.", "/a?b", "/v1", "/ui/a", "/openapi.json"])
def test_what_is_no_root_is_named(token_file: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(token_file, "--leaders", "a:1", "--root-path", text)
    assert "--root-path" in (message := capsys.readouterr().err) and repr(text) in message
