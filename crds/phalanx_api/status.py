"""The status of an InferenceService: counters and conditions, never live gauges."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from phalanx_api.conditions import Condition
from phalanx_api.schema import Record

MAX_LISTED_GROUPS = 64
NodeName = Annotated[str, StringConstraints(max_length=253)]
GroupPhase = Literal["Ready", "Starting", "Terminating"]


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
    """Why it is not ready, if a pod says so."""


class Status(Record):
    """What the operator last saw and did."""

    observed_generation: int = 0
    replicas: int = 0
    """Groups that exist and are not being deleted."""
    ready_replicas: int = 0
    """Groups of which every pod is ready."""
    updated_replicas: int = 0
    """Groups of the newest revision."""
    selector: str = Field(default="", max_length=256)
    """Label selector of the leader pods, one per group, for autoscalers."""
    url: str = Field(default="", max_length=256)
    current_revision: str = Field(default="", max_length=63)
    """The newest revision that was rolled out whole."""
    update_revision: str = Field(default="", max_length=63)
    """The revision of the spec as it is now."""
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=MAX_LISTED_GROUPS,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """At most 64 groups, those that are not ready first."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
