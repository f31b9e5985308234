"""`spec.placement`: nodes and schedulers of a group's pods."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from phalanx_api.schema import Record, rule, rules

# Affinity of Kubernetes pods, with bounds for CEL.

_KEY = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
Key = Annotated[str, StringConstraints(min_length=1, max_length=316, pattern=_KEY)]
Value = Annotated[str, StringConstraints(max_length=63)]
Namespace = Annotated[str, StringConstraints(min_length=1, max_length=63)]
_VALUES = "values are required with the operators In and NotIn and only allowed there"
_NUMBER = "Gt and Lt need exactly one value, an integer"


class NodeRequirement(Record):
    """Requirement on a node label."""

    model_config = Record.model_config | rules(
        rule(
            "self.operator in ['Gt', 'Lt'] || (self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            _VALUES,
            ".values",
        ),
        rule(
            "!(self.operator in ['Gt', 'Lt']) || "
            "(has(self.values) && size(self.values) == 1 && self.values[0].matches('^-?[0-9]+$'))",
            _NUMBER,
            ".values",
        ),
    )
    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[Value, ...] | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _fits(self) -> "NodeRequirement":
        values = self.values or ()
        if self.operator in ("Gt", "Lt"):
            if len(values) != 1 or not values[0].removeprefix("-").isdecimal():
                raise ValueError(_NUMBER)
        elif (self.operator in ("In", "NotIn")) != bool(values):
            raise ValueError(_VALUES)
        return self


class NodeTerm(Record):
    """Nodes that match all expressions."""

    match_expressions: tuple[NodeRequirement, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})


class NodeSelector(Record):
    """Nodes that match any term."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})


class PreferredNodes(Record):
    """Preferred nodes."""

    weight: int = Field(ge=1, le=100)
    preference: NodeTerm


class NodeAffinity(Record):
    """Node affinity, in addition to `accelerator.product`."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] | None = Field(default=None, max_length=16)


class LabelRequirement(Record):
    """Requirement on a label of a pod or namespace."""

    model_config = Record.model_config | rules(
        rule("(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)", _VALUES, ".values")
    )
    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[Value, ...] | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _fits(self) -> "LabelRequirement":
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError(_VALUES)
        return self


class LabelSelector(Record):
    """Pods or namespaces with all of the labels; empty selects all."""

    match_labels: dict[str, Value] | None = Field(default=None, json_schema_extra={"maxProperties": 16})
    match_expressions: tuple[LabelRequirement, ...] | None = Field(default=None, max_length=16)


class PodTerm(Record):
    """Pods on nodes with the same value of the label `topologyKey`."""

    topology_key: Key
    label_selector: LabelSelector | None = None
    namespaces: tuple[Namespace, ...] | None = Field(default=None, max_length=16)
    """Namespaces of the pods. Default: the service's."""
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)
    mismatch_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)


class PreferredPods(Record):
    """Preferred (anti-)affinity to pods."""

    weight: int = Field(ge=1, le=100)
    pod_affinity_term: PodTerm


class PodAffinity(Record):
    """Pod affinity, in addition to `topology` and `spreadGroups`."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] | None = Field(default=None, max_length=16)
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] | None = Field(default=None, max_length=16)


class Affinity(Record):
    """Affinity, as in a pod."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


_LABEL = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
_VALUE = r"^$|^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_KEYS = "keys must be labels of nodes, such as example.com/pool"
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=316, pattern=_LABEL)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=_VALUE)]
Wish = Literal["None", "Preferred", "Required"]
GangMode = Literal["Auto", "None", "Fallback", "Native", "Volcano", "Kueue"]
_NEEDS_QUEUE = "gang mode Kueue needs queueName, the LocalQueue that admits the groups"


def _keys(selector: dict[str, str]) -> dict[str, str]:
    if not all(re.search(_LABEL, key) for key in selector):
        raise ValueError(_KEYS)
    return selector


class Toleration(Record):
    """A toleration, as in a pod."""

    key: str | None = Field(default=None, max_length=316)
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = Field(default=None, max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0)


class Topology(Record):
    """Co-location of the pods of one group."""

    key: LabelKey = "topology.kubernetes.io/zone"
    """Node label with the same value for all pods of a group."""
    mode: Wish = "None"


class Gang(Record):
    """Gang scheduling of a group's pods."""

    mode: GangMode = "Auto"
    """Native: Kubernetes PodGroup. Volcano: its PodGroup. Kueue: its queue. Fallback: groups are created in turn, partly placed
    ones deleted. None: pods are placed one by one. Auto: Volcano with `schedulerName: volcano`, Kueue with `queueName`, Native
    without `schedulerName`, otherwise or in clusters without these Fallback."""
    timeout_seconds: int = Field(default=300, ge=1, le=86_400)
    """Fallback: time that a partly placed group may wait."""


class Placement(Record):
    """Placement of the pods of groups."""

    model_config = Record.model_config | rules(
        rule("!has(self.gang) || self.gang.mode != 'Kueue' || has(self.queueName)", _NEEDS_QUEUE, ".queueName")
    )
    node_selector: Annotated[dict[str, LabelValue], AfterValidator(_keys)] = Field(
        default_factory=dict, json_schema_extra={"maxProperties": 32}
    )
    """Required node labels."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    affinity: Affinity | None = None
    """Affinity as in a pod, in addition to other fields."""
    topology: Topology = Field(default_factory=Topology)
    spread_groups: Wish = "None"
    """Places groups of the service on different nodes."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    runtime_class_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    scheduler_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    gang: Gang = Field(default_factory=Gang)
    queue_name: str | None = Field(default=None, min_length=1, max_length=253, pattern=_NAME)
    """Queue of Kueue or Volcano."""

    @model_validator(mode="after")
    def _queue(self) -> "Placement":
        if self.gang.mode == "Kueue" and self.queue_name is None:
            raise ValueError(_NEEDS_QUEUE)
        return self
