"""Structural OpenAPI schemas of pydantic models, as Kubernetes requires."""

import copy
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

_CONFIG = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True)
ModelT = TypeVar("ModelT", bound=BaseModel)


class Record(BaseModel):
    """A record that refuses unknown fields."""

    model_config = _CONFIG | ConfigDict(extra="forbid")


class OpenRecord(BaseModel):
    """A record that passes unknown fields through."""

    model_config = _CONFIG | ConfigDict(extra="allow")


def parse_record(model: type[ModelT], document: Any) -> ModelT:
    """Parses a record, without the unknown fields that a newer CRD adds. Raises ValidationError."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        unknown = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
        if not unknown:
            raise
    known = copy.deepcopy(document)
    for *path, last in unknown:
        record = known
        for step in path:
            record = record[step]
        del record[last]
    return model.model_validate(known)


def rule(expression: str, message: str, field: str = "") -> JsonDict:
    """Returns a CEL rule. `field`: path that a violation names, such as `.gpusPerPod`."""
    path: JsonDict = {"fieldPath": field} if field else {}
    return {"rule": expression, "message": message} | path


def with_rules(*cel_rules: JsonDict) -> JsonDict:
    """Returns the schema keyword with CEL rules, for a field."""
    return {"x-kubernetes-validations": [*cel_rules]}


def rules(*cel_rules: JsonDict) -> ConfigDict:
    """Returns the model configuration with CEL rules, for an object."""
    return ConfigDict(json_schema_extra=with_rules(*cel_rules))


OPTIONAL = "may be absent"
"""Key that marks optional objects in the result of `structural_schema`."""


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the structural schema of a model, with `OPTIONAL` marks."""
    whole = model.model_json_schema(by_alias=True)
    return copy.deepcopy(_inline(whole, whole.get("$defs", {})))  # YAML would write shared parts as anchors


def _inline(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Resolves references; removes null types and keywords that structural schemas lack."""
    node = {k: v for k, v in node.items() if k not in ("title", "$defs")}
    if ref := node.pop("$ref", None):
        node = _inline(definitions[ref.rsplit("/", 1)[1]], definitions) | node
    if "anyOf" in node and "x-kubernetes-int-or-string" not in node:
        kinds = [kind for kind in node["anyOf"] if kind != {"type": "null"}]
        if len(kinds) < len(node.pop("anyOf")):
            node[OPTIONAL] = True
        if len(kinds) != 1:
            raise TypeError(f"a field of several types has no structural schema: {kinds}")
        node = _inline(kinds[0], definitions) | node
    if node.get("default", ...) is None:
        del node["default"]
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in node:
        node["properties"] = {name: _inline(child, definitions) for name, child in node["properties"].items()}
    if isinstance(node.get("items"), dict):
        node["items"] = _inline(node["items"], definitions)
    extra = node.pop("additionalProperties", False)
    if isinstance(extra, dict):
        node["additionalProperties"] = _inline(extra, definitions)
    elif extra:
        node["x-kubernetes-preserve-unknown-fields"] = True
    return node
