"""A path in front of all paths, of an Ingress that several services share."""

import argparse
import re
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_api import labels

_DOCUMENTATION = ("/docs", "/redoc", "/openapi.json")


class RootPathMiddleware:
    """ASGI middleware: serves paths below `root` as those without it, which are served too.

    A gateway removes the root from a request, an Ingress mostly not. No root is a path of the API, so a request has one meaning.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""
        path: str = scope.get("path", "")  # events of the lifespan have none
        if path == self._root or path.startswith(f"{self._root}/"):
            path = path.removeprefix(self._root) or "/"
            scope = {**scope, "path": path, "raw_path": quote(path).encode("ascii")}
        if path in _DOCUMENTATION:  # FastAPI links them to one another
            scope = {**scope, "root_path": self._root}
        await self._app(scope, receive, send)


def root_path(text: str) -> str:
    """Returns the root without the slash of `/`. Raises ArgumentTypeError if it is none."""
    if text in ("", "/"):
        return ""
    if not re.fullmatch(labels.ROOT_PATH, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no path such as /team/chat: no slash at its end, no . and .. in it")
    if re.fullmatch(labels.OWN_PATH, text):
        raise argparse.ArgumentTypeError(f"{text!r} begins with a path of the API")
    return text


def below_root(app: Starlette, root: str) -> ASGIApp:
    """Returns the app with a root, if there is one. Redirects to paths without a slash at the end would lead out of it."""
    if not root:
        return app
    app.router.redirect_slashes = False
    return RootPathMiddleware(app, root)
