"""What a pod tells at /healthz, /readyz, /v1/health and /v1/metrics: the door's `Vitals`, from the supervisor and the engine."""

from collections.abc import Sequence
from typing import Protocol

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.health import Health, RankHealth, Totals
from phalanx_frontend.metrics import Tally
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.supervision.supervisor import Status


class Supervised(Protocol):
    """What is asked of a supervisor."""

    def status(self) -> Status:
        """Whether the group serves."""
        ...

    def stuck(self) -> str | None:
        """Why this pod cannot mend itself, or None when it can."""
        ...

    def ranks(self) -> list[RankHealth]:
        """The ranks of this pod."""
        ...

    def memory(self) -> list[MemoryAccount]:
        """The account of each rank that is known to be ready."""
        ...


class PodVitals:
    """Implements the door's `Vitals`. Totals are those of the engine: what came over the link and by the pod's own door."""

    def __init__(self, supervisor: Supervised, tally: Tally, client: EngineClient | None = None) -> None:
        self._supervisor = supervisor
        self._tally = tally
        self._client = client

    def health(self) -> Health:
        """Whether the pod can mend itself, whether the group serves, and the ranks of this pod."""
        status = self._supervisor.status()
        not_ready = None if status.ready else status.reason
        if self._client is not None and not_ready is None:  # the group is well, but the pod may be leaving
            state = self._client.state()
            not_ready = None if state.serving else state.reason
        return Health(
            not_alive=self._supervisor.stuck(),
            not_ready=not_ready,
            incarnation=status.incarnation,
            ranks=self._supervisor.ranks(),
        )

    def totals(self) -> Totals:
        """What the engine served."""
        return self._tally.totals()

    def memory(self) -> Sequence[MemoryAccount]:
        """The account of each rank that is ready."""
        return self._supervisor.memory()

    def kv_bytes_per_token(self) -> int | None:
        """What the ranks that are ready take for a token together."""
        return sum(account.kv_bytes_per_token for account in self.memory()) or None
