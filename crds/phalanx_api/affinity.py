"""`spec.placement.affinity`: which nodes, and which other pods, the pods of groups keep to or away from, as in a pod."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from phalanx_api.schema import Record, rule, rules

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
