"""What the operator measures of itself and of its services, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx_api.status import Status
from phalanx_operator.store import Key


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.reconcile_seconds = Histogram("phalanx_operator_reconcile_seconds", "Time of one look at a service.", registry=r)
        self.errors = Counter("phalanx_operator_reconcile_errors_total", "Looks that ended in an error.", ["error"], registry=r)
        self.status_writes = Counter("phalanx_operator_status_writes_total", "Status writes.", registry=r)
        self.queue_keys = Gauge("phalanx_operator_queue_keys", "Services that wait to be looked at.", registry=r)
        self.is_leader = Gauge("phalanx_operator_is_leader", "Whether this process holds the lease.", registry=r)
        names = ["namespace", "service"]
        self.groups = Gauge("phalanx_service_groups", "Groups that exist.", names, registry=r)
        self.ready_groups = Gauge("phalanx_service_ready_groups", "Groups of which every pod is ready.", names, registry=r)

    def show(self, key: Key, status: Status) -> None:
        """The counts of a service."""
        self.groups.labels(*key).set(status.replicas)
        self.ready_groups.labels(*key).set(status.ready_replicas)

    def forget(self, key: Key) -> None:
        """Show nothing more of a service that is gone."""
        for gauge in (self.groups, self.ready_groups):
            gauge.remove_by_labels({"namespace": key[0], "service": key[1]})
