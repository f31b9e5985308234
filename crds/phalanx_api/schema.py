"""From pydantic models to structural OpenAPI schemas that the API server accepts: no $ref, no anyOf for optional fields."""

import copy
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

_CONFIG = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True)
Kind = TypeVar("Kind", bound=BaseModel)


class Record(BaseModel):
    """A closed record of the API: unknown fields are refused."""

    model_config = _CONFIG | ConfigDict(extra="forbid")


class OpenRecord(BaseModel):
    """A record of which only some fields are ours; the others pass through unread."""

    model_config = _CONFIG | ConfigDict(extra="allow")


def read(model: type[Kind], found: Any) -> Kind:
    """The record that this is, without the fields that only a later version knows. Raises: ValidationError.

    The API server fills in the defaults of a newer CRD before the operator that reads them is replaced; fields that no version
    knows do not get through it.
    """
    try:
        return model.model_validate(found)
    except ValidationError as error:
        strange = [wrong["loc"] for wrong in error.errors() if wrong["type"] == "extra_forbidden"]
        if not strange:
            raise
    known = copy.deepcopy(found)
    for *path, last in strange:
        record = known
        for step in path:
            record = record[step]
        del record[last]
    return model.model_validate(known)


def rule(expression: str, message: str, field: str = "") -> JsonDict:
    """A CEL rule: what must hold, what to say otherwise, and the field to name (`.gpusPerPod`)."""
    at: JsonDict = {"fieldPath": field} if field else {}
    return {"rule": expression, "message": message} | at


def with_rules(*these: JsonDict) -> JsonDict:
    """What carries CEL rules into the schema of a field."""
    return {"x-kubernetes-validations": [*these]}


def rules(*these: JsonDict) -> ConfigDict:
    """Model configuration that carries CEL rules into the schema."""
    return ConfigDict(json_schema_extra=with_rules(*these))


OPTIONAL = "may be absent"
"""Marks, in what `structural` gives, an object that is None unless somebody writes it."""


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of a model, optional objects marked."""
    whole = model.model_json_schema(by_alias=True)
    return copy.deepcopy(_inline(whole, whole.get("$defs", {})))  # shared parts would become anchors in YAML


def _inline(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """This node with references put in place, `null` left out, and only words that structural schemas know."""
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
