"""The status of an InferenceService: counters and conditions, never live gauges."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from phalanx_api.conditions import Condition
from phalanx_api.schema import Record

MAX_LISTED_GROUPS = 64
NodeName = Annotated[str, StringConstraints(max_length=253)]
GroupPhase = Literal["Ready", "Starting", "Draining", "Terminating"]
MAX_LISTED_HOTSPOTS = 16


class GroupStatus(Record):
    """One group as last observed."""

    name: str = Field(max_length=63)
    revision: str = Field(default="", max_length=63)
    phase: GroupPhase
    pods: int = 0
    ready_pods: int = 0
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=64)
    """Nodes of the pods, by pod index; shorter while some are not scheduled."""
    reason: str = Field(default="", max_length=256)
    """Why it is not ready, as a pod or its leader reports."""
    restarts: int = 0
    """Restarts within `restartPolicy.windowSeconds`, or since it served, without an outside cause."""
    incarnation: int = 0
    """Incarnation that routers report; 0 before the first report."""


MAX_HISTORY = 5


class ScaleChange(Record):
    """A change of the count."""

    time: str = Field(max_length=64)
    before: int
    after: int
    reason: str = Field(max_length=64)
    """As in `autoscaling.reason`."""
    message: str = Field(default="", max_length=256)


class AutoscalingStatus(Record):
    """The autoscaler's last decision. Its inputs are metrics."""

    desired: int = 0
    """Wanted groups."""
    min_replicas: int = 0
    max_replicas: int = 0
    """The bounds in effect."""
    bounds: str = Field(default="", max_length=256)
    """Source of the bounds."""
    reason: str = Field(default="", max_length=64)
    """Why the count last changed: Out, Panic, In, Zero, Wake, Bounds or Fallback."""
    message: str = Field(default="", max_length=512)
    last_scale_time: str = Field(default="", max_length=64)
    """When the operator last wrote `spec.replicas`."""
    cold_start_seconds: int = 0
    """95th percentile of the time until a group serves; 0 before the first measurement."""
    history: tuple[ScaleChange, ...] = Field(default=(), max_length=MAX_HISTORY)
    """The last 5 changes by the operator, or its advice where another client writes the count; the newest last."""


class HotspotStatus(Record):
    """An overloaded group."""

    group: str = Field(max_length=63)
    cause: str = Field(max_length=32)
    since: str = Field(max_length=64)
    action: str = Field(max_length=64)
    """The measure in progress."""


class RebalancingStatus(Record):
    """Overloaded groups."""

    hotspots: tuple[HotspotStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_HOTSPOTS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["group"]},
    )
    saturated: bool = False
    """More than half of the groups are overloaded: only more groups help."""


class RollbackStatus(Record):
    """A revision that was given up because its groups never served, with `rollout.onFailure: Rollback`."""

    revision: str = Field(max_length=63)
    to: str = Field(max_length=63)
    """The revision that groups have again."""
    since: str = Field(max_length=64)
    message: str = Field(default="", max_length=512)


MAX_AVOIDED = 16


class RecoveryStatus(Record):
    """Groups of the newest revision that were given up because they restarted too often."""

    revision: str = Field(max_length=63)
    given_up: int = 0
    last_time: str = Field(max_length=64)
    """Time of the last one."""
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=MAX_AVOIDED)
    """Their nodes, which successors avoid if possible."""
    message: str = Field(default="", max_length=512)


class ModelStatus(Record):
    """The served model."""

    resolved_revision: str = Field(default="", max_length=128)
    """Version that the newest serving group has loaded: the commit of `hf://`, the manifest digest of `oci://`, a hash of a
    bucket's listing; empty for a file or a claim, and before a group reports it. Existing groups keep the version that they have
    loaded."""
    cached_nodes: int = 0
    """Number of nodes where ready pods have it in their own claims (cache `NodeLocal`)."""


class Status(Record):
    """Observed state of the service."""

    observed_generation: int = 0
    replicas: int = 0
    """Groups that are not draining."""
    ready_replicas: int = 0
    """Groups with all pods ready."""
    available_replicas: int = 0
    """Groups that have been ready for `rollout.minReadySeconds`, are not draining and are linked to a router: they accept
    requests."""
    updated_replicas: int = 0
    """Groups of the newest revision that are not draining."""
    draining_replicas: int = 0
    """Groups that are draining."""
    restarts: int = 0
    """Restarts of all groups, see `groups`."""
    selector: str = Field(default="", max_length=256)
    """Label selector of the leader pods, one per group, for autoscalers."""
    url: str = Field(default="", max_length=256)
    current_revision: str = Field(default="", max_length=63)
    """The newest revision with a complete rollout."""
    update_revision: str = Field(default="", max_length=63)
    """Revision of the current spec."""
    model: ModelStatus = Field(default_factory=ModelStatus)
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_GROUPS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """At most 64 groups, those that are not ready first."""
    autoscaling: AutoscalingStatus | None = None
    gang: str = Field(default="", max_length=32)
    """Scheduler that places the pods of new groups."""
    recovery: RecoveryStatus | None = None
    rollback: RollbackStatus | None = None
    rebalancing: RebalancingStatus = Field(default_factory=RebalancingStatus)
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
