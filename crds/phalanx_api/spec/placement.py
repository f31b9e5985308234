"""Where the pods of a group may run, and who places them: `spec.placement`."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from phalanx_api.schema import Record, rule, rules

# `spec.placement.affinity`: which nodes, and which other pods, the pods of groups keep to or away from, as in a pod.

_KEY = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
Key = Annotated[str, StringConstraints(min_length=1, max_length=316, pattern=_KEY)]
Value = Annotated[str, StringConstraints(max_length=63)]
Namespace = Annotated[str, StringConstraints(min_length=1, max_length=63)]
_VALUES = "values go with the operators In and NotIn, which need them"
_NUMBER = "Gt and Lt need exactly one value, an integer"


class NodeRequirement(Record):
    """What a label of a node must be."""

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
    """Nodes that meet all of these."""

    match_expressions: tuple[NodeRequirement, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})


class NodeSelector(Record):
    """Nodes that meet one of these."""

    node_selector_terms: tuple[NodeTerm, ...] = Field(max_length=16, json_schema_extra={"minItems": 1})


class PreferredNodes(Record):
    """Nodes that are better than others, by this weight."""

    weight: int = Field(ge=1, le=100)
    preference: NodeTerm


class NodeAffinity(Record):
    """Which nodes. What `resources.accelerator.product` asks for holds beside it."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] | None = Field(default=None, max_length=16)


class LabelRequirement(Record):
    """What a label of a pod or a namespace must be."""

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
    """Pods or namespaces with all of these labels; an empty one selects all."""

    match_labels: dict[str, Value] | None = Field(default=None, json_schema_extra={"maxProperties": 16})
    match_expressions: tuple[LabelRequirement, ...] | None = Field(default=None, max_length=16)


class PodTerm(Record):
    """Pods, and how near: nodes with the same value of the label `topologyKey`."""

    topology_key: Key
    label_selector: LabelSelector | None = None
    namespaces: tuple[Namespace, ...] | None = Field(default=None, max_length=16)
    """Whose pods; those of the service's own namespace otherwise."""
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)
    mismatch_label_keys: tuple[Key, ...] | None = Field(default=None, max_length=16)


class PreferredPods(Record):
    """Pods that it is better to be near to, or away from, by this weight."""

    weight: int = Field(ge=1, le=100)
    pod_affinity_term: PodTerm


class PodAffinity(Record):
    """Which pods. What `placement.topology` and `placement.spreadGroups` ask for holds beside it."""

    required_during_scheduling_ignored_during_execution: tuple[PodTerm, ...] | None = Field(default=None, max_length=16)
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] | None = Field(default=None, max_length=16)


class Affinity(Record):
    """Nodes and other pods that the pods of groups keep to, or away from."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


_LABEL = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
_VALUE = r"^$|^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_KEYS = "keys are labels of nodes, such as example.com/pool"
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=316, pattern=_LABEL)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=_VALUE)]
Wish = Literal["None", "Preferred", "Required"]
GangMode = Literal["Auto", "None", "Fallback", "Native", "Volcano", "Kueue"]
_NEEDS_QUEUE = "gang mode Kueue needs queueName: the LocalQueue that admits the groups"


def _keys(selector: dict[str, str]) -> dict[str, str]:
    if not all(re.search(_LABEL, key) for key in selector):
        raise ValueError(_KEYS)
    return selector


class Toleration(Record):
    """A taint that the pods bear, as in a pod."""

    key: str | None = Field(default=None, max_length=316)
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = Field(default=None, max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0)


class Topology(Record):
    """Which pods of one group are kept together."""

    key: LabelKey = "topology.kubernetes.io/zone"
    """Label of nodes: all pods of a group run on nodes with the same value."""
    mode: Wish = "None"


class Gang(Record):
    """How all pods of a group are placed, or none."""

    mode: GangMode = "Auto"
    """Native: a PodGroup of Kubernetes. Volcano: one of Volcano. Kueue: its queue admits whole groups. Fallback: groups are made
    one after another, and a half one gives its devices back. Auto: Volcano with `schedulerName: volcano`, Kueue with `queueName`,
    Native without `schedulerName`, and Fallback where that is another one or the cluster has none of these. None: pods are placed
    one by one."""
    timeout_seconds: int = Field(default=300, ge=1, le=86_400)
    """Fallback: how long a group may wait with only some of its pods placed."""


class Placement(Record):
    """Where the pods of groups may run."""

    model_config = Record.model_config | rules(
        rule("!has(self.gang) || self.gang.mode != 'Kueue' || has(self.queueName)", _NEEDS_QUEUE, ".queueName")
    )
    node_selector: Annotated[dict[str, LabelValue], AfterValidator(_keys)] = Field(
        default_factory=dict, json_schema_extra={"maxProperties": 32}
    )
    """Labels that nodes must have."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    affinity: Affinity | None = None
    """Nodes and other pods to keep to or away from, as in a pod. What the other fields ask for holds beside it."""
    topology: Topology = Field(default_factory=Topology)
    spread_groups: Wish = "None"
    """Groups of the service keep away from one another's nodes."""
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
