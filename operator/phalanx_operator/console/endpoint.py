"""HTTP of the console: the page at `/ui`, open to all, and its data below `/ui/api/`.

Data needs a bearer token of Kubernetes. The operator reads with that token and with none of its own rights, so a user sees what
RBAC lets that user see. A token is never a cookie, so another site cannot send it.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from phalanx_api.pages.static_files import API, HEADERS, PATH, static_files
from phalanx_operator.console.services import ServiceRow, service_row
from phalanx_operator.kube.client import INFERENCE_SERVICES, Denied, Gone, KubeClient, KubeError, Retry, Unauthenticated
from phalanx_operator.scaling_history import ScalingHistory

log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,8192}")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
MAX_SERVICES = 2000
"""Services of one answer."""
MAX_LISTS = 2
"""Lists at once: each holds up to a page of whole objects."""
TIMEOUT_S = 9.0
"""Of an answer; the page waits 10 s."""


class ServiceList(msgspec.Struct, frozen=True):
    """Services that the user may see, sorted by namespace and name."""

    services: list[ServiceRow]
    is_truncated: bool


class ScalingPoint(msgspec.Struct, frozen=True):
    """One decision of the autoscaler."""

    ago_s: float
    desired: int
    needed: int | None


class ScalingPoints(msgspec.Struct, frozen=True):
    """Decisions of the last hour, oldest first. Empty at an operator that does not lead."""

    leads: bool
    points: list[ScalingPoint]


@dataclass(frozen=True, slots=True)
class ServicesConsole:
    """Answers the requests of the page."""

    as_user: Callable[[str], KubeClient]
    """Returns a client with a user's token and nothing else."""
    history: ScalingHistory
    leads: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    lists: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LISTS))

    async def services(self, request: web.Request) -> web.Response:
        """Lists the services of all namespaces, or of one that the query `namespace` names."""
        kube = self._kube(request)
        namespace = request.query.get("namespace") or None
        _check_name(namespace)
        rows, after = list[ServiceRow](), ""
        async with self.lists:
            while True:
                try:
                    page = await kube.list_page(INFERENCE_SERVICES, namespace, "", after)
                except Gone as error:
                    raise Retry(f"the list is incomplete, or the CRD is missing: {error}") from error
                rows += map(service_row, page.items)
                after = page.next_page
                if not after or len(rows) >= MAX_SERVICES:
                    break
        rows.sort(key=lambda row: (row.namespace, row.name))
        return _json(ServiceList(rows[:MAX_SERVICES], bool(after) or len(rows) > MAX_SERVICES))

    async def scaling(self, request: web.Request) -> web.Response:
        """Returns the decisions about one service that the user may read."""
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        _check_name(namespace, name)
        await self._kube(request).get(INFERENCE_SERVICES, namespace, name)
        now = self.clock()
        points = [ScalingPoint(now - at_s, desired, needed) for at_s, desired, needed in self.history.of((namespace, name), now)]
        return _json(ScalingPoints(self.leads(), points))

    def _kube(self, request: web.Request) -> KubeClient:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not _TOKEN.fullmatch(token):
            raise Unauthenticated("a bearer token of Kubernetes is required: kubectl create token NAME")
        return self.as_user(token)


def add_console(app: web.Application, console: ServicesConsole) -> None:
    """Adds page and data to an application."""
    files = static_files(__package__)

    async def file(request: web.Request) -> web.Response:
        found = files.get(request.path)
        if found is None:
            return _error(404, "not_found", "no such path")
        headers = {"ETag": found.etag, "Cache-Control": "no-cache", **HEADERS}
        if request.headers.get("If-None-Match") == found.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.content, headers={**headers, "Content-Type": found.media_type})

    app.add_routes(
        [
            web.get(f"{API}services", _answered(console.services)),
            web.get(f"{API}scaling/{{namespace}}/{{name}}", _answered(console.scaling)),
            web.get(PATH, file),
            web.get(f"{PATH}/{{file:.*}}", file),
        ]
    )


def _answered(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answered(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await handler(request)
        except Unauthenticated as error:
            return _error(401, "invalid_token", str(error))
        except Denied as error:
            return _error(403, "forbidden", str(error))
        except Gone as error:
            return _error(404, "not_found", str(error))
        except (KubeError, TimeoutError) as error:
            log.warning("the console has no answer of the API server", extra={"path": request.path, "why": repr(error)})
            return _error(503, "kubernetes_unavailable", "the API server does not answer")

    return answered


def _check_name(*names: str | None) -> None:
    if not all(name is None or _NAME.fullmatch(name) for name in names):
        raise Gone("no such namespace or service")


def _json(found: msgspec.Struct) -> web.Response:
    headers = {"Cache-Control": "no-store", "Content-Type": "application/json", **HEADERS}
    return web.Response(body=msgspec.json.encode(found), headers=headers)


def _error(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(
        status=status, body=body, headers={"Cache-Control": "no-store", "Content-Type": "application/json", **HEADERS}
    )
