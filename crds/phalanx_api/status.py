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
    """One group as the operator last saw it."""

    name: str = Field(max_length=63)
    revision: str = Field(default="", max_length=63)
    phase: GroupPhase
    pods: int = 0
    ready_pods: int = 0
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=64)
    """Nodes of the pods, by pod index; shorter while some are not scheduled."""
    reason: str = Field(default="", max_length=256)
    """Why it is not ready, if a pod or its leader says so."""
    restarts: int = 0
    """How often it was started anew in the last `restartPolicy.windowSeconds`, or since it served, for no cause outside of it."""
    incarnation: int = 0
    """Its joint start, as routers know it; 0 before they do."""


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
    """What the autoscaler last did. The numbers behind it are metrics."""

    desired: int = 0
    """Groups that should be wanted."""
    min_replicas: int = 0
    max_replicas: int = 0
    """The bounds that hold now."""
    bounds: str = Field(default="", max_length=256)
    """What they come from."""
    reason: str = Field(default="", max_length=64)
    """Why the count changed last: Out, Panic, In, Zero, Wake, Bounds or Fallback."""
    message: str = Field(default="", max_length=512)
    last_scale_time: str = Field(default="", max_length=64)
    """When the operator last wrote `spec.replicas`."""
    cold_start_seconds: int = 0
    """How long groups take until they serve, 95 of 100; 0 before one was seen to start."""
    history: tuple[ScaleChange, ...] = Field(default=(), max_length=MAX_HISTORY)
    """The last 5 changes that the operator made, or advised where somebody else writes the count; the newest last."""


class HotspotStatus(Record):
    """A group in trouble."""

    group: str = Field(max_length=63)
    cause: str = Field(max_length=32)
    since: str = Field(max_length=64)
    action: str = Field(max_length=64)
    """What is done about it."""


class RebalancingStatus(Record):
    """Which groups are in trouble."""

    hotspots: tuple[HotspotStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_HOTSPOTS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["group"]},
    )
    saturated: bool = False
    """More than half of the groups are: nothing but more of them helps."""


class RollbackStatus(Record):
    """A revision that was given up because its groups did not come to serve, with `rollout.onFailure: Rollback`."""

    revision: str = Field(max_length=63)
    to: str = Field(max_length=63)
    """The revision that groups are of again."""
    since: str = Field(max_length=64)
    message: str = Field(default="", max_length=512)


MAX_AVOIDED = 16


class RecoveryStatus(Record):
    """Groups of the newest revision that were given up because they were restarted too often."""

    revision: str = Field(max_length=63)
    given_up: int = 0
    last_time: str = Field(max_length=64)
    """When the last one was."""
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=MAX_AVOIDED)
    """Where they ran: their successors keep away from there, if they can."""
    message: str = Field(default="", max_length=512)


class ModelStatus(Record):
    """Which model is served."""

    resolved_revision: str = Field(default="", max_length=128)
    """What the newest group that serves has loaded: the commit of `hf://`, the digest of the manifest of `oci://`, one of what
    a bucket lists; empty for a file or a claim, and before a group has told. Groups that were made when a branch or tag meant
    something else stay as they are."""
    cached_nodes: int = 0
    """On how many nodes pods that are ready have it in claims of their own (cache `NodeLocal`)."""


class Status(Record):
    """What the operator last saw and did."""

    observed_generation: int = 0
    replicas: int = 0
    """Groups that exist and stay."""
    ready_replicas: int = 0
    """Groups of which every pod is ready."""
    available_replicas: int = 0
    """Groups that have been ready for `rollout.minReadySeconds`, stay, and are linked to a router: new requests may go there."""
    updated_replicas: int = 0
    """Groups of the newest revision that stay."""
    draining_replicas: int = 0
    """Groups that are being emptied before they go."""
    restarts: int = 0
    """Of all groups together: see `groups`."""
    selector: str = Field(default="", max_length=256)
    """Label selector of the leader pods, one per group, for autoscalers."""
    url: str = Field(default="", max_length=256)
    current_revision: str = Field(default="", max_length=63)
    """The newest revision that was rolled out whole."""
    update_revision: str = Field(default="", max_length=63)
    """The revision of the spec as it is now."""
    model: ModelStatus = Field(default_factory=ModelStatus)
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_GROUPS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """At most 64 groups, those that are not ready first."""
    autoscaling: AutoscalingStatus | None = None
    gang: str = Field(default="", max_length=32)
    """Who places the pods of groups that are made now."""
    recovery: RecoveryStatus | None = None
    rollback: RollbackStatus | None = None
    rebalancing: RebalancingStatus = Field(default_factory=RebalancingStatus)
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
