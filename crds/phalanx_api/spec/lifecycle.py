"""`spec.rollout`, `spec.rebalancing`, `spec.drain` and `spec.restartPolicy`."""

from typing import Literal

from pydantic import Field, model_validator

from phalanx_api.schema import Record, rule, rules
from phalanx_api.spec.quantities import Memory, Share, share_of
from phalanx_api.summary import Mode


class RebalancingBudgets(Record):
    """Limits of all routers together."""

    moves_per_group: int = Field(default=8, ge=1, le=1024)
    """Concurrent moves out of one group, and into one; each router gets an equal share, at least 1."""
    bandwidth: Memory | None = None
    """KV transfer of one group, in bytes per second. Default: the measured rate."""
    live_tokens_percent_per_second: int = Field(default=2, ge=1, le=100)
    """Percent of all tokens in KV pages that may move per second."""


class Rebalancing(Record):
    """Movement of load away from overloaded groups."""

    mode: Mode = "Migrate"
    """Requests that move. Off: no requests. Route: new ones. Requeue: also waiting ones. Migrate: also running ones."""
    budgets: RebalancingBudgets = Field(default_factory=RebalancingBudgets)
    pull_prefixes: bool = True
    """A group that lacks a request's prefix copies its pages from a group that has them, if that takes less time than computing
    them. In every mode, within `budgets`."""
    share_pages: bool = False
    """The groups of this service, and those of all others of the namespace with this field and equal weights, copy pages from
    each other; without `pullPrefixes` they only send. Tenants are compared by name: the services need the same ones. A change
    restarts the routers."""


_NONE = ("0", "0%")
_BOTH_ZERO = "maxUnavailable and maxSurge must not both be 0: no group could ever be replaced"


class Rollout(Record):
    """Replacement of groups of an old revision."""

    model_config = Record.model_config | rules(
        rule(
            "!((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge == '0%') && "
            "(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable == '0%'))",
            _BOTH_ZERO,
            ".maxUnavailable",
        )
    )
    max_unavailable: Share = 1
    """Groups, or a percentage of `replicas`, that may be unavailable, for any reason. More is faster."""
    max_surge: Share = 0
    """Groups above `replicas`, or a percentage of it: their predecessors leave when they are ready. Without nodes for them,
    `maxUnavailable` applies."""
    surge_timeout_seconds: int = Field(default=300, ge=0, le=86_400)
    """Time that a group above `replicas` may wait for nodes."""
    partition: int = Field(default=0, ge=0, le=1000)
    """Groups that keep their old revision until they are lost."""
    paused: bool = False
    """Pauses the rollout. New groups still have the newest revision."""
    min_ready_seconds: int = Field(default=0, ge=0, le=86_400)
    """Time that a group must be ready before it counts as available and the rollout continues. It gets requests at once."""
    progress_deadline_seconds: int = Field(default=3600, ge=1, le=604_800)
    """Time for a group of the newest revision to become ready; then the rollout stops, with condition `Stalled`."""
    on_failure: Literal["Pause", "Rollback"] = "Pause"
    """Action after that time. Pause: serving groups stay. Rollback: groups return to the last revision that completed with this
    setting, until the spec changes."""
    canary_weight: int | None = Field(default=None, ge=0, le=100)
    """Percent of new requests for the newest revision while older ones serve. A revision without capacity
    passes its share on. Default: by cost."""
    restart_id: str = Field(default="", max_length=128)
    """Any change replaces all groups, in a rollout."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Rollout":
        if str(self.max_unavailable) in _NONE and str(self.max_surge) in _NONE:
            raise ValueError(_BOTH_ZERO)
        return self

    def surge(self, replicas: int) -> int:
        """Returns the allowed groups above `replicas`."""
        return share_of(self.max_surge, replicas, up=True)

    def unavailable(self, replicas: int) -> int:
        """Returns the groups that may be unavailable; 1 where percentages of few groups round both limits to 0."""
        count = min(share_of(self.max_unavailable, replicas, up=False), replicas)
        return count if count or self.surge(replicas) else 1


class Drain(Record):
    """Removal of a group: its streams move or finish first. Changes apply to new pods."""

    pre_stop_seconds: int = Field(default=0, ge=0, le=3600)
    """Time that a deleted pod continues before SIGTERM."""
    timeout_seconds: int = Field(default=300, ge=0, le=86_400)
    """Time for streams to move or finish; the rest is replayed on other groups. Longer slows rollouts and scale-in."""

    @property
    def grace_s(self) -> int:
        """Grace period of a pod: both times and 15 s to exit."""
        return self.pre_stop_seconds + self.timeout_seconds + 15


class RestartPolicy(Record):
    """Restart and replacement of failing groups."""

    mode: Literal["RecreateGroup", "None"] = "RecreateGroup"
    """RecreateGroup: all pods of a failing group are replaced, then the group. None: only ranks and containers restart."""
    startup_seconds: int = Field(default=1800, ge=1, le=86_400)
    """Time for a group to become ready; must exceed the model's load time."""
    max_group_restarts: int = Field(default=5, ge=0, le=32)
    """Restarts, and failures without outside cause, within `windowSeconds` before a group on other nodes replaces it."""
    window_seconds: int = Field(default=3600, ge=1, le=604_800)
    """Time for which a restart counts."""
    node_lost_seconds: int = Field(default=120, ge=1, le=86_400)
    """Time that a node may be unreachable, or a pod may outlast its grace period, before its groups are replaced."""
