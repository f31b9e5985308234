"""JSON texts of values that a model wrote as text, by the schema of their function's parameters."""

import json
from collections.abc import Mapping
from typing import Any

WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Words of JSON and Python, in lower case."""
NO_TYPES: frozenset[str] = frozenset()
MAX_DEPTH = 8
"""References and alternatives that are followed."""


_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Types of schemas that have these words and no type."""


def string(text: str) -> str:
    """Returns a text as the inside of a JSON string. Half a surrogate pair is escaped, because it has no UTF-8."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return inside if inside.isascii() or not _has_surrogate(inside) else json.dumps(text)[1:-1]


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Returns the JSON types that a parameter may have; empty if its schema has none."""
    return frozenset(_types(parameter_schema(schema, name), schema, MAX_DEPTH))


def parameter_schema(schema: Mapping[str, Any], name: str) -> Any:
    """Returns the schema of a parameter, which may be one of the additional ones; null if there is none."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if declared is None else declared


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {name for name in _list(declared) if isinstance(name, str)}
    for choice in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        types |= _types(choice, root, depth - 1)
    for part in _list(schema.get("allOf")):
        others = _types(part, root, depth - 1)
        types = types & others if types and others else types | others
    if not types:
        values = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
        types = {_type_of(value) for value in values}
    reference = schema.get("$ref")
    if not types and isinstance(reference, str) and reference.startswith("#/"):
        types = _types(_resolved(root, reference), root, depth - 1)
    return types or {name for word, name in _IMPLIED.items() if word in schema}


def text_choices(schema: Mapping[str, Any], name: str) -> list[str] | None:
    """Returns the texts that a parameter may be; null if it may be any text."""
    return _choices(parameter_schema(schema, name), schema, MAX_DEPTH)


def _choices(schema: Any, root: Mapping[str, Any], depth: int) -> list[str] | None:
    if not isinstance(schema, Mapping) or not depth:
        return None
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [value for value in values if isinstance(value, str)]
    if parts := (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        each = [_choices(part, root, depth - 1) for part in parts]
        return None if None in each else list(dict.fromkeys(text for texts in each for text in texts or ()))
    for part in _list(schema.get("allOf")):
        if (choices := _choices(part, root, depth - 1)) is not None:
            return choices
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and "type" not in schema:
        return _choices(_resolved(root, reference), root, depth - 1)
    types = _types(schema, root, depth)
    return [] if types and "string" not in types else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolved(root: Any, reference: str) -> Any:
    for key in reference[2:].split("/"):
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of a value: as one of `types` if it can be read so, else as a string."""
    bare = text.strip()
    word = WORDS.get(bare.lower())
    candidate = word if word is not None else bare
    try:
        kind = _type_of(json.loads(candidate, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return f'"{string(text)}"'
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return candidate if is_allowed or "string" not in types else f'"{string(text)}"'


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
