"""Health of a pod from its supervisor and engine: /healthz, /readyz, /v1/health, /v1/metrics."""

from collections.abc import Sequence
from typing import Protocol

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.health import Health, HealthTotals, RankHealth
from phalanx_frontend.metrics import RequestTotals
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.supervision.supervisor import SupervisorStatus


class Supervised(Protocol):
    """Part of a supervisor that health needs."""

    def status(self) -> SupervisorStatus:
        """Whether the group serves."""
        ...

    def stuck(self) -> str | None:
        """Reason this pod cannot recover by itself; None if it can."""
        ...

    def ranks(self) -> list[RankHealth]:
        """Health of this pod's ranks."""
        ...

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of the ranks that are ready."""
        ...


class PodHealthSource:
    """Implements `HealthSource`. Totals count all requests of the engine, from the link and the pod's own API server."""

    def __init__(self, supervisor: Supervised, tally: RequestTotals, client: EngineClient | None = None) -> None:
        self._supervisor = supervisor
        self._tally = tally
        self._client = client

    def health(self) -> Health:
        """Liveness and readiness of the pod, and the health of its ranks."""
        status = self._supervisor.status()
        not_ready = None if status.ready else status.reason
        if self._client is not None and not_ready is None:  # the group serves, but the pod may be draining
            state = self._client.state()
            not_ready = None if state.serving else state.reason
        return Health(
            not_alive=self._supervisor.stuck(),
            not_ready=not_ready,
            incarnation=status.incarnation,
            ranks=self._supervisor.ranks(),
        )

    def totals(self) -> HealthTotals:
        """Totals of the engine."""
        return self._tally.totals()

    def memory(self) -> Sequence[MemoryAccount]:
        """Memory accounts of the ranks that are ready."""
        return self._supervisor.memory()

    def kv_bytes_per_token(self) -> int | None:
        """KV bytes per token, summed over the ranks that are ready; None if unknown."""
        return sum(account.kv_bytes_per_token for account in self.memory()) or None
