"""The operator's console over an API server in memory, whose users have different rights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer

from phalanx_operator.console.endpoint import ServicesConsole, add_console
from phalanx_operator.kube.client import INFERENCE_SERVICES, Denied, Json, Page, Resource, Unauthenticated
from phalanx_operator.scaling_history import ScalingHistory
from tests.control.fake_kube import FakeKube

RIGHTS = {"admin": "", "team-token": "team"}
"""Namespace that a token may read; empty: all."""


def service(name: str = "chat", namespace: str = "team", status: Json | None = None, **spec: Any) -> Json:
    """Returns an InferenceService."""
    metadata = {"namespace": namespace, "name": name}
    spec = {"model": {"uri": "pvc://models/m"}, "replicas": 2} | spec
    return {"apiVersion": "phalanx.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec} | (
        {"status": status} if status is not None else {}
    )


class UserKube(FakeKube):
    """The objects of `store` with the rights of a token."""

    def __init__(self, store: FakeKube, token: str) -> None:
        super().__init__()
        self.objects, self.failures, self._token = store.objects, store.failures, token

    def _check(self, namespace: str | None) -> None:
        if self._token not in RIGHTS:
            raise Unauthenticated("GET: 401 Unauthorized")
        if RIGHTS[self._token] not in ("", namespace):
            raise Denied("GET: 403 forbidden")

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        self._check(namespace)
        return await super().get(resource, namespace, name, metadata_only=metadata_only)

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        self._check(namespace)
        return await super().list_page(resource, namespace, selector, after, fields=fields)


@dataclass(frozen=True, slots=True)
class RunningServicesConsole:
    """A served console; `kube` has its objects."""

    http: httpx.AsyncClient
    kube: FakeKube
    history: ScalingHistory
    clock: list[float] = field(default_factory=lambda: [1000.0])

    async def get(self, path: str, token: str = "admin") -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return await self.http.get(path, headers=headers)


@asynccontextmanager
async def running_services_console(*bodies: Json, leads: bool = True) -> AsyncIterator[RunningServicesConsole]:
    """Serves the console of some services."""
    kube, history, clock, app = FakeKube(), ScalingHistory(), [1000.0], web.Application()
    for body in bodies:
        kube.put(INFERENCE_SERVICES, body)
    add_console(app, ServicesConsole(lambda token: UserKube(kube, token), history, lambda: leads, lambda: clock[0]))
    async with TestServer(app) as server, httpx.AsyncClient(base_url=str(server.make_url("")), timeout=30) as http:
        yield RunningServicesConsole(http, kube, history, clock)
