"""Prometheus metrics of the operator and its services, and its HTTP endpoint."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from phalanx_api.status import Status
from phalanx_operator.decide.scaling.scale import ScaleDecision
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
        self.groups = Gauge("phalanx_service_groups", "Groups that are not draining.", names, registry=r)
        self.draining_groups = Gauge("phalanx_service_draining_groups", "Groups that are draining.", names, registry=r)
        self.hot_groups = Gauge("phalanx_service_hot_groups", "Groups that are hotspots.", names, registry=r)
        self.desired_groups = Gauge(
            "phalanx_operator_desired_groups", "Groups that the autoscaler wants, for HPA or KEDA.", names, registry=r
        )
        self.needed_groups = Gauge(
            "phalanx_operator_needed_groups", "Groups that the load of the last minute needs.", names, registry=r
        )
        self.ready_groups = Gauge("phalanx_service_ready_groups", "Groups with all pods ready.", names, registry=r)

    def show(self, key: Key, status: Status) -> None:
        """Updates the gauges of a service."""
        self.groups.labels(*key).set(status.replicas)
        self.ready_groups.labels(*key).set(status.ready_replicas)
        self.draining_groups.labels(*key).set(status.draining_replicas)
        self.hot_groups.labels(*key).set(len(status.rebalancing.hotspots))

    def show_scaling(self, key: Key, decision: ScaleDecision | None) -> None:
        """Updates the desired and needed groups; removes both for a service without autoscaler."""
        if decision is None:
            _remove((self.desired_groups, self.needed_groups), key)
            return
        self.desired_groups.labels(*key).set(decision.groups)
        if decision.needed is not None:
            self.needed_groups.labels(*key).set(decision.needed)

    def forget(self, key: Key) -> None:
        """Removes the metrics of a deleted service."""
        of_services = (self.groups, self.ready_groups, self.draining_groups, self.hot_groups)
        _remove((*of_services, self.desired_groups, self.needed_groups), key)


def _remove(gauges: Iterable[Gauge], key: Key) -> None:
    for gauge in gauges:
        gauge.remove_by_labels({"namespace": key[0], "service": key[1]})


# The operator's HTTP endpoint: /healthz, /readyz and /metrics.
# Healthy means that the watches received data recently; a hung reconcile is cancelled by the work loop.


class Health:
    """Why the operator is not healthy or not ready, as sentences. Each probe calls `stalls`."""

    def __init__(self) -> None:
        self.stalls: Callable[[], list[str]] = list
        self.ready = False


def make_app(health: Health, metrics: Metrics) -> web.Application:
    """Returns the HTTP application."""

    async def healthz(_: web.Request) -> web.Response:
        wrong = health.stalls()
        return web.Response(status=503 if wrong else 200, text="; ".join(wrong) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if health.ready else 503, text="ok" if health.ready else "starting")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show_metrics)])
    return app


async def serve(app: web.Application, port: int) -> web.AppRunner:
    """Returns the running server; the caller calls its `cleanup`."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
