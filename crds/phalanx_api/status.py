"""The status of an InferenceService: counters and conditions, no gauges."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from phalanx_api.conditions import Condition
from phalanx_api.schema import Record
from phalanx_api.spec.adapters import MAX_ADAPTERS

MAX_LISTED_GROUPS = 64
NodeName = Annotated[str, StringConstraints(max_length=253)]
GroupPhase = Literal["Ready", "Starting", "Draining", "Terminating"]
MAX_LISTED_HOTSPOTS = 16


class GroupStatus(Record):
    """One group."""

    name: str = Field(max_length=63)
    revision: str = Field(default="", max_length=63)
    phase: GroupPhase
    pods: int = 0
    ready_pods: int = 0
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=64)
    """Nodes of the scheduled pods, by pod index."""
    reason: str = Field(default="", max_length=256)
    """Why the group is not ready."""
    restarts: int = 0
    """Restarts within `restartPolicy.windowSeconds` or since it served."""
    incarnation: int = 0
    """Incarnation; 0 before a router reports it."""


MAX_HISTORY = 5


class ScaleChange(Record):
    """A change of the number of groups."""

    time: str = Field(max_length=64)
    before: int
    after: int
    reason: str = Field(max_length=64)
    """As in `autoscaling.reason`."""
    message: str = Field(default="", max_length=256)


class AutoscalingStatus(Record):
    """The autoscaler's last decision."""

    desired: int = 0
    """Desired groups."""
    min_replicas: int = 0
    """Lower bound in effect."""
    max_replicas: int = 0
    """Upper bound in effect."""
    bounds: str = Field(default="", max_length=256)
    """Source of the bounds."""
    reason: str = Field(default="", max_length=64)
    """Reason of the last change: Out, Panic, In, Zero, Wake, Bounds or Fallback."""
    message: str = Field(default="", max_length=512)
    last_scale_time: str = Field(default="", max_length=64)
    """Time of the operator's last write of `spec.replicas`."""
    cold_start_seconds: int = 0
    """95th percentile of a group's start time; 0 before a measurement."""
    history: tuple[ScaleChange, ...] = Field(default=(), max_length=MAX_HISTORY)
    """The last 5 changes, or recommendations outside mode Internal; newest last."""


class HotspotStatus(Record):
    """An overloaded group."""

    group: str = Field(max_length=63)
    cause: str = Field(max_length=32)
    since: str = Field(max_length=64)
    action: str = Field(max_length=64)
    """Measure in progress."""


class RebalancingStatus(Record):
    """Overloaded groups."""

    hotspots: tuple[HotspotStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_HOTSPOTS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["group"]},
    )
    saturated: bool = False
    """More than half of the groups are overloaded; only more groups help."""


class RollbackStatus(Record):
    """A revision that `rollout.onFailure: Rollback` abandoned."""

    revision: str = Field(max_length=63)
    to: str = Field(max_length=63)
    """Revision of the groups after the rollback."""
    since: str = Field(max_length=64)
    message: str = Field(default="", max_length=512)


MAX_AVOIDED = 16


class RecoveryStatus(Record):
    """Groups of the newest revision that were replaced after too many restarts."""

    revision: str = Field(max_length=63)
    given_up: int = 0
    last_time: str = Field(max_length=64)
    """Time of the last replacement."""
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=MAX_AVOIDED)
    """Nodes that their successors avoid."""
    message: str = Field(default="", max_length=512)


class ModelStatus(Record):
    """The served model."""

    resolved_revision: str = Field(default="", max_length=128)
    """Loaded version of the newest serving group: commit, manifest digest, or hash of a bucket's listing; empty for files and
    claims."""
    cached_nodes: int = 0
    """Nodes with the model in claims of ready pods (cache `NodeLocal`)."""


class HostCacheStatus(Record):
    """Estimated hit rates of page lookups on the device and in host memory, by the pages of the host tier."""

    pages: int
    """Limit of the host tier; in groups without one, the pages of the device."""
    is_used: bool = False
    """Whether the groups have a host tier."""
    hit_percent_half: int
    """Hit rate with half these pages, in percent."""
    hit_percent: int
    """With these pages."""
    hit_percent_twice: int
    """With twice these pages."""
    hit_percent_four_times: int
    """With four times these pages."""


class CacheStatus(Record):
    """Estimated hit rates of the prefix cache in groups of the newest revision, by their number of pages.

    Means over the groups, weighted by page lookups. Written when one of them changes by 5 points, or `CacheSized` changes.
    """

    pages: int
    """Pages of the smallest group."""
    page_bytes: int = 0
    """Bytes of a page over all ranks; 0 if unknown."""
    hit_percent_half: int
    """Hit rate of page lookups with half the pages, in percent."""
    hit_percent: int
    """With the present pages."""
    hit_percent_twice: int
    """With twice the pages."""
    hit_percent_four_times: int
    """With four times the pages."""
    hit_percent_with_host: int | None = None
    """Counted with the present host tier. Absent without one."""
    hit_percent_with_disk: int | None = None
    """Counted with the host tier and the disk. Absent without one."""
    host: HostCacheStatus | None = None
    """By the size of the host tier. Absent until pages were looked up there."""


AdapterState = Literal["Loaded", "NotLoaded", "Failing", "Refused"]


MAX_LOADED_GROUPS = 16
MAX_REFUSING_GROUPS = 8


class AdapterRefusal(Record):
    """A group that cannot load an adapter."""

    group: str = Field(max_length=63)
    state: Literal["Failing", "Refused"]
    """Failing: its download or load failed, and is tried again. Refused: the adapter does not fit the group."""
    message: str = Field(default="", max_length=256)


class AdapterStatus(Record):
    """An adapter of `spec.adapters`, by the reports of routers."""

    name: str = Field(max_length=128)
    state: AdapterState
    """NotLoaded: no request needed it, or other adapters took its slots. Failing: its download or load failed, and is tried
    again. Refused: no group can use it."""
    loaded: int = 0
    """Groups that hold it."""
    message: str = Field(default="", max_length=256)
    """Why a group cannot load it."""
    groups: tuple[Annotated[str, StringConstraints(max_length=63)], ...] = Field(default=(), max_length=MAX_LOADED_GROUPS)
    """Names of at most 16 groups that hold it."""
    refusals: tuple[AdapterRefusal, ...] = Field(
        default=(),
        max_length=MAX_REFUSING_GROUPS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["group"]},
    )
    """At most 8 groups that cannot load it, those that refuse it first."""


class Status(Record):
    """Observed state of the service."""

    observed_generation: int = 0
    replicas: int = 0
    """Groups that are not draining."""
    ready_replicas: int = 0
    """Groups with all pods ready."""
    available_replicas: int = 0
    """Groups that are ready for `rollout.minReadySeconds`, connected to a router and not draining."""
    updated_replicas: int = 0
    """Groups of the newest revision that are not draining."""
    draining_replicas: int = 0
    """Draining groups."""
    disruptions_allowed: int = 0
    """Available groups that the operator may take out of service now, for all causes together; 0 while disruptions are held."""
    restarts: int = 0
    """Sum of the groups' restarts."""
    selector: str = Field(default="", max_length=256)
    """Label selector of the leader pods, for autoscalers."""
    url: str = Field(default="", max_length=256)
    current_revision: str = Field(default="", max_length=63)
    """Newest completely rolled out revision."""
    update_revision: str = Field(default="", max_length=63)
    """Revision of the current spec."""
    model: ModelStatus = Field(default_factory=ModelStatus)
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_GROUPS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """At most 64 groups, unready ones first."""
    autoscaling: AutoscalingStatus | None = None
    gang: str = Field(default="", max_length=32)
    """Gang scheduler of new groups."""
    recovery: RecoveryStatus | None = None
    rollback: RollbackStatus | None = None
    surge_failure_time: str = Field(default="", max_length=64)
    """Since when there is no surge, because its group found no node; empty otherwise."""
    rebalancing: RebalancingStatus = Field(default_factory=RebalancingStatus)
    cache: CacheStatus | None = None
    """Prefix cache of the groups by its size. Absent before `CacheSized` is True or False."""
    adapters: tuple[AdapterStatus, ...] = Field(
        default=(),
        max_length=MAX_ADAPTERS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The adapters of the spec."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=20,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
