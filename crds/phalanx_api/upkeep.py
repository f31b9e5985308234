"""How groups that run are kept: `spec.rollout`, `spec.rebalancing`, `spec.drain` and `spec.restartPolicy`."""

from pydantic import Field

from phalanx_api.quantities import Memory
from phalanx_api.schema import Record
from phalanx_api.summary import Mode


class RebalancingBudgets(Record):
    """What all routers together may move."""

    moves_per_group: int = Field(default=8, ge=1, le=1024)
    """Streams that leave one group at once, and that come to one. Each router has an equal part, and at least 1."""
    bandwidth: Memory | None = None
    """Bytes per second that the transfers of one group may take; measured otherwise."""
    live_tokens_percent_per_second: int = Field(default=2, ge=1, le=100)
    """Share of all tokens in KV pages that may move in a second."""


class Rebalancing(Record):
    """Whether load moves away from groups in trouble."""

    mode: Mode = "Migrate"
    """Off: not at all. Route: new requests go elsewhere. Requeue: waiting ones too. Migrate: running ones too."""
    budgets: RebalancingBudgets = Field(default_factory=RebalancingBudgets)


class Rollout(Record):
    """How groups are replaced."""

    restart_id: str = Field(default="", max_length=128)
    """Any change replaces every group, one after another; what it says is up to you. In a new service it starts nothing."""


class Drain(Record):
    """How a group leaves: its streams move to others or finish first. Pods have what held when they were made."""

    pre_stop_seconds: int = Field(default=0, ge=0, le=3600)
    """How long a pod goes on untouched after somebody asked it to end."""
    timeout_seconds: int = Field(default=300, ge=0, le=86_400)
    """How long streams have to move or finish; then the group goes, and they are replayed on another one."""

    @property
    def grace_s(self) -> int:
        """Grace period of a pod: what its streams have, and 15 s to end."""
        return self.pre_stop_seconds + self.timeout_seconds + 15


class RestartPolicy(Record):
    """When a group is given up for another one."""

    node_lost_seconds: int = Field(default=120, ge=1, le=86_400)
    """How long a node may be away before groups with pods there are replaced."""
