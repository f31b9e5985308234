"""Prometheus metrics, and the endpoint with /healthz, /readyz and /metrics."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from phalanx_api import labels
from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.scaling.scale import ScaleDecision
from phalanx_operator.kube.client import Json, KubeClient, KubeError, Page, Resource
from phalanx_operator.kube.store import Key


class Metrics:
    """The operator's metrics in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.reconcile_seconds = Histogram("phalanx_operator_reconcile_seconds", "Time of one reconcile.", registry=r)
        self.errors = Counter("phalanx_operator_reconcile_errors_total", "Reconciles that failed.", ["error"], registry=r)
        self.status_writes = Counter("phalanx_operator_status_writes_total", "Status writes.", registry=r)
        self.actions = Counter("phalanx_operator_actions_total", "Actions on groups and their number.", ["action"], registry=r)
        calls = ["verb", "kind"]
        self.api_calls = Counter("phalanx_operator_api_calls_total", "API server calls.", calls, registry=r)
        self.api_errors = Counter(
            "phalanx_operator_api_errors_total", "API server calls that failed.", [*calls, "error"], registry=r
        )
        self.watch_age = Gauge(
            "phalanx_operator_watch_age_seconds", "Time since the last data of a watch, by kind.", ["kind"], registry=r
        )
        ProcessCollector(registry=r)
        self.queue_keys = Gauge("phalanx_operator_queue_keys", "Services that are due for a reconcile.", registry=r)
        self.is_leader = Gauge("phalanx_operator_is_leader", "Whether this process holds the lease.", registry=r)
        names = ["namespace", "service"]
        self.spec_replicas = Gauge(
            "phalanx_service_spec_replicas", "Groups that the spec wants; 0 while it is suspended.", names, registry=r
        )
        self.groups = Gauge("phalanx_service_groups", "Groups that are not draining.", names, registry=r)
        self.draining_groups = Gauge("phalanx_service_draining_groups", "Groups that are draining.", names, registry=r)
        self.hot_groups = Gauge("phalanx_service_hot_groups", "Groups that are hotspots.", names, registry=r)
        self.partitioned = Gauge(
            "phalanx_service_partitioned",
            "Whether only commands delete groups, because many nodes are silent.",
            names,
            registry=r,
        )
        self.disruptions_held = Gauge(
            "phalanx_service_disruptions_held", "Whether groups are kept that would otherwise be replaced.", names, registry=r
        )
        self.desired_groups = Gauge(
            "phalanx_operator_desired_groups", "Groups that the autoscaler wants, for HPA or KEDA.", names, registry=r
        )
        self.needed_groups = Gauge(
            "phalanx_operator_needed_groups", "Groups that the load of the last minute needs.", names, registry=r
        )
        self.ready_groups = Gauge("phalanx_service_ready_groups", "Groups with all pods ready.", names, registry=r)

    def show(self, key: Key, status: Status) -> None:
        """Updates the gauges of a status."""
        self.groups.labels(*key).set(status.replicas)
        self.ready_groups.labels(*key).set(status.ready_replicas)
        self.draining_groups.labels(*key).set(status.draining_replicas)
        self.hot_groups.labels(*key).set(len(status.rebalancing.hotspots))
        self.partitioned.labels(*key).set(find_condition(status.conditions, "ControlPlanePartitioned") is not None)
        self.disruptions_held.labels(*key).set(find_condition(status.conditions, "DisruptionsHeld") is not None)

    def show_wanted(self, key: Key, replicas: int) -> None:
        """Updates the number of groups that a valid spec wants, also if the API server refuses each of them."""
        self.spec_replicas.labels(*key).set(replicas)

    def show_scaling(self, key: Key, decision: ScaleDecision | None) -> None:
        """Updates the autoscaler's gauges; removes them without a decision."""
        if decision is None:
            _remove((self.desired_groups, self.needed_groups), key)
            return
        self.desired_groups.labels(*key).set(decision.groups)
        if decision.needed is not None:
            self.needed_groups.labels(*key).set(decision.needed)

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        status_gauges = (self.spec_replicas, self.groups, self.ready_groups, self.draining_groups, self.hot_groups)
        _remove((*status_gauges, self.partitioned, self.disruptions_held, self.desired_groups, self.needed_groups), key)


def _remove(gauges: Iterable[Gauge], key: Key) -> None:
    for gauge in gauges:
        gauge.remove_by_labels({"namespace": key[0], "service": key[1]})


class Health:
    """Health of the watches. The work loop cancels hung reconciles."""

    def __init__(self) -> None:
        self.stalls: Callable[[], list[str]] = list
        """Returns stalled watches."""
        self.ready = False
        self.leads = False


def make_app(health: Health, metrics: Metrics) -> web.Application:
    """Returns the HTTP application."""

    async def healthz(_: web.Request) -> web.Response:
        stalls = health.stalls()
        return web.Response(status=503 if stalls else 200, text="; ".join(stalls) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if health.ready else 503, text="ok" if health.ready else "starting")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show_metrics)])
    return app


async def serve(app: web.Application, port: int) -> web.AppRunner:
    """Starts the server at all addresses, IPv4 and IPv6. The caller calls `cleanup`."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


class CountingKube:
    """Counts calls to `inner`, with verbs of RBAC."""

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

    async def apply(
        self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = labels.MANAGER
    ) -> Json:
        """See KubeClient."""
        with self._counted("patch", resource, subresource):
            return await self._inner.apply(resource, body, subresource=subresource, manager=manager)

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
