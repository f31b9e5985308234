"""What the operator measures of itself and of its services, for Prometheus."""

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from phalanx_api.status import Status
from phalanx_operator.decide.scaling.scale import Decision
from phalanx_operator.kube.store import Key


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.reconcile_seconds = Histogram("phalanx_operator_reconcile_seconds", "Time of one look at a service.", registry=r)
        self.errors = Counter("phalanx_operator_reconcile_errors_total", "Looks that ended in an error.", ["error"], registry=r)
        self.status_writes = Counter("phalanx_operator_status_writes_total", "Status writes.", registry=r)
        self.actions = Counter(
            "phalanx_operator_actions_total", "What was done to groups and their number.", ["action"], registry=r
        )
        calls = ["verb", "kind"]
        self.api_calls = Counter("phalanx_operator_api_calls_total", "Calls of the API server.", calls, registry=r)
        self.api_errors = Counter(
            "phalanx_operator_api_errors_total", "Calls that did not succeed.", [*calls, "error"], registry=r
        )
        self.watch_age = Gauge(
            "phalanx_operator_watch_age_seconds", "Since the API server last said anything of a kind.", ["kind"], registry=r
        )
        ProcessCollector(registry=r)
        self.queue_keys = Gauge("phalanx_operator_queue_keys", "Services that are due to be looked at.", registry=r)
        self.is_leader = Gauge("phalanx_operator_is_leader", "Whether this process holds the lease.", registry=r)
        names = ["namespace", "service"]
        self.groups = Gauge("phalanx_service_groups", "Groups that exist and stay.", names, registry=r)
        self.draining_groups = Gauge("phalanx_service_draining_groups", "Groups that are being emptied.", names, registry=r)
        self.hot_groups = Gauge("phalanx_service_hot_groups", "Groups that are hotspots.", names, registry=r)
        self.desired_groups = Gauge(
            "phalanx_operator_desired_groups", "Groups that the autoscaler wants: for HPA or KEDA to follow.", names, registry=r
        )
        self.needed_groups = Gauge(
            "phalanx_operator_needed_groups", "Groups that the load of the last minute needs.", names, registry=r
        )
        self.ready_groups = Gauge("phalanx_service_ready_groups", "Groups of which every pod is ready.", names, registry=r)

    def show(self, key: Key, status: Status) -> None:
        """The counts of a service."""
        self.groups.labels(*key).set(status.replicas)
        self.ready_groups.labels(*key).set(status.ready_replicas)
        self.draining_groups.labels(*key).set(status.draining_replicas)
        self.hot_groups.labels(*key).set(len(status.rebalancing.hotspots))

    def show_scaling(self, key: Key, decision: Decision | None) -> None:
        """What the autoscaler wants, and what the load needs; nothing where there is no autoscaler."""
        if decision is None:
            _remove((self.desired_groups, self.needed_groups), key)
            return
        self.desired_groups.labels(*key).set(decision.groups)
        if decision.needed is not None:
            self.needed_groups.labels(*key).set(decision.needed)

    def forget(self, key: Key) -> None:
        """Show nothing more of a service that is gone."""
        of_services = (self.groups, self.ready_groups, self.draining_groups, self.hot_groups)
        _remove((*of_services, self.desired_groups, self.needed_groups), key)


def _remove(gauges: Iterable[Gauge], key: Key) -> None:
    for gauge in gauges:
        gauge.remove_by_labels({"namespace": key[0], "service": key[1]})


# The operator's own HTTP endpoint: /healthz, /readyz and /metrics.
# Healthy means that it works, not that it has a socket: the watches were heard lately. A look at a service ends by itself.


class Health:
    """What keeps the operator from being healthy or ready, as sentences. `stalls` is asked at each probe."""

    def __init__(self) -> None:
        self.stalls: Callable[[], list[str]] = list
        self.ready = False


def make_app(health: Health, metrics: Metrics) -> web.Application:
    """The endpoint."""

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
    """The running server; its owner calls `cleanup` on it."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
