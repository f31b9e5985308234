"""A KubeClient that counts the calls of another client, and their errors."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from phalanx_operator.kube.client import Json, KubeClient, KubeError, Page, Resource
from phalanx_operator.metrics import Metrics


class CountingKube:
    """Delegates to `inner`. Verbs are those of Kubernetes RBAC."""

    def __init__(self, inner: KubeClient, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics

    @contextmanager
    def _counted(self, verb: str, resource: Resource, subresource: str | None = None) -> Iterator[None]:
        kind = f"{resource.plural}/{subresource}" if subresource else resource.plural
        self._metrics.api_calls.labels(verb, kind).inc()
        try:
            yield
        except KubeError as error:
            self._metrics.api_errors.labels(verb, kind, type(error).__name__).inc()
            raise

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        """See KubeClient."""
        with self._counted("get", resource):
            return await self._inner.get(resource, namespace, name, metadata_only=metadata_only)

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        """See KubeClient."""
        with self._counted("create", resource):
            return await self._inner.create(resource, body, dry_run=dry_run)

    async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None) -> Json:
        """See KubeClient."""
        with self._counted("patch", resource, subresource):
            return await self._inner.apply(resource, body, subresource=subresource)

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """See KubeClient."""
        with self._counted("patch", resource, subresource):
            return await self._inner.merge(resource, namespace, name, patch, subresource=subresource)

    async def replace(self, resource: Resource, body: Json) -> Json:
        """See KubeClient."""
        with self._counted("update", resource):
            return await self._inner.replace(resource, body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        """See KubeClient."""
        with self._counted("delete", resource):
            await self._inner.delete(resource, namespace, name, uid, grace_s=grace_s)

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        """See KubeClient."""
        with self._counted("list", resource):
            return await self._inner.list_page(resource, namespace, selector, after, fields=fields)

    async def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        """See KubeClient."""
        with self._counted("watch", resource):
            async for event in self._inner.watch(resource, namespace, selector, resource_version):
                yield event
