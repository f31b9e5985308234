"""How groups that run are kept: `spec.rollout`, `spec.rebalancing`, `spec.drain` and `spec.restartPolicy`."""

from typing import Literal

from pydantic import Field, model_validator

from phalanx_api.schema import Record, rule, rules
from phalanx_api.spec.quantities import Memory, Share, share_of
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


_NONE = ("0", "0%")
_BOTH_ZERO = "maxUnavailable and maxSurge must not both be 0: no group could ever be replaced"


class Rollout(Record):
    """How groups are replaced when what changes a pod changes."""

    model_config = Record.model_config | rules(
        rule(
            "!((type(self.maxSurge) == int ? self.maxSurge == 0 : self.maxSurge == '0%') && "
            "(type(self.maxUnavailable) == int ? self.maxUnavailable == 0 : self.maxUnavailable == '0%'))",
            _BOTH_ZERO,
            ".maxUnavailable",
        )
    )
    max_unavailable: Share = 1
    """Groups, or a percentage of `replicas`, that may be missing at once. What was broken before counts too."""
    max_surge: Share = 0
    """Groups above `replicas`, or a percentage of it: then a group goes only when its successor is ready. Where the cluster has
    no room for that, groups go first after all, as `maxUnavailable` allows."""
    surge_timeout_seconds: int = Field(default=300, ge=0, le=86_400)
    """How long a group above `replicas` may wait for room."""
    partition: int = Field(default=0, ge=0, le=1000)
    """Groups that stay on their old revision, while they live."""
    paused: bool = False
    """Replace no group for its revision. Groups that are lost or added are of the newest one all the same."""
    min_ready_seconds: int = Field(default=0, ge=0, le=86_400)
    """How long a group must have been ready until it counts as available: until then no other one is given up for a revision, and
    the service is not `Ready`. Requests go to a group as soon as it is ready."""
    progress_deadline_seconds: int = Field(default=3600, ge=1, le=604_800)
    """How long a group of the newest revision may take to be ready; then the rollout stops, and `Stalled` says so."""
    on_failure: Literal["Pause", "Rollback"] = "Pause"
    """What follows when that time is over. Pause: groups that serve stay as they are. Rollback: groups are of the last revision
    again that was rolled out whole with this setting, until the spec changes."""
    canary_weight: int | None = Field(default=None, ge=0, le=100)
    """While groups of an older and of the newest revision serve: share of the new requests, in percent, that routers send to the
    newest. Without it they go wherever they cost least. What one of the two cannot take goes to the other."""
    restart_id: str = Field(default="", max_length=128)
    """Any change replaces every group, one after another; what it says is up to you. In a new service it starts nothing."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "Rollout":
        if str(self.max_unavailable) in _NONE and str(self.max_surge) in _NONE:
            raise ValueError(_BOTH_ZERO)
        return self

    def surge(self, replicas: int) -> int:
        """How many groups above so many."""
        return share_of(self.max_surge, replicas, up=True)

    def unavailable(self, replicas: int) -> int:
        """How many of so many may be missing; one where percentages of few groups come to nothing at all."""
        count = min(share_of(self.max_unavailable, replicas, up=False), replicas)
        return count if count or self.surge(replicas) else 1


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
    """When a group is started anew, and when it is given up for another one."""

    mode: Literal["RecreateGroup", "None"] = "RecreateGroup"
    """RecreateGroup: all pods of a group that does not come to serve are replaced, and it is given up if that does not help.
    None: only what ranks and containers do by themselves."""
    startup_seconds: int = Field(default=1800, ge=1, le=86_400)
    """How long a group may take to be ready, from its start or from when it was ready last: the time to load the model."""
    max_group_restarts: int = Field(default=5, ge=0, le=32)
    """How often a group may be started anew, or die without a cause outside, before another takes its place on other nodes."""
    window_seconds: int = Field(default=3600, ge=1, le=604_800)
    """For how long a restart counts."""
    node_lost_seconds: int = Field(default=120, ge=1, le=86_400)
    """How long a node may be away before groups with pods there are replaced."""
