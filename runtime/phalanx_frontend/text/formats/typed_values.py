"""JSON texts of values that a model wrote as text, by the schema of their function's parameters."""

import json
from collections.abc import Mapping
from typing import Any

WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Words of JSON and Python, in lower case."""
NO_TYPES: frozenset[str] = frozenset()
MAX_DEPTH = 8
"""References and alternatives that are followed, one in another."""
MAX_PARTS = 5_000
"""Parts of a function's schema that are read. A schema that refers to itself n times has about n to the fourth in `MAX_DEPTH`."""

_DEFINITIONS = ("$defs", "definitions")
_LISTS = ("type", "enum", "anyOf", "oneOf", "allOf")
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""Types of schemas that have these words and no type."""


def string(text: str) -> str:
    """Returns a text as the inside of a JSON string. Half a surrogate pair is escaped, because it has no UTF-8."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return inside if inside.isascii() or not _has_surrogate(inside) else json.dumps(text)[1:-1]


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


class Parameters:
    """Parameters of a function. Parts of its schema beyond the bounds say nothing about types and texts."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._parts_left = MAX_PARTS

    @property
    def definitions(self) -> dict[str, Any]:
        """Schemas that references name."""
        return {word: self._root[word] for word in _DEFINITIONS if word in self._root}

    def schema(self, name: str) -> Any:
        """Returns the schema of a parameter, which may be one of the additional ones; null if there is none."""
        properties = self._root.get("properties")
        declared = properties.get(name) if isinstance(properties, Mapping) else None
        return self._root.get("additionalProperties") if declared is None else declared

    def types(self, name: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have; empty if its schema has none."""
        return frozenset(self._types(self.schema(name), MAX_DEPTH))

    def texts(self, name: str) -> list[str] | None:
        """Returns the texts that a parameter may be; null if it may be any text."""
        return self._texts(self.schema(name), MAX_DEPTH)

    def _types(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or not self._may_read(schema, depth):
            return set()
        declared = schema.get("type")
        types = {declared} if isinstance(declared, str) else {name for name in _list(declared) if isinstance(name, str)}
        for choice in _alternatives(schema):
            types |= self._types(choice, depth - 1)
        for part in _list(schema.get("allOf")):
            others = self._types(part, depth - 1)
            types = _common(types, others) if types and others else types | others
        if not types:
            values = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
            types = {_type_of(value) for value in values}
        reference = schema.get("$ref")
        if not types and isinstance(reference, str) and reference.startswith("#/"):
            types = self._types(self._resolved(reference), depth - 1)
        return types or {name for word, name in _IMPLIED.items() if word in schema}

    def _texts(self, schema: Any, depth: int) -> list[str] | None:
        if not isinstance(schema, Mapping) or not self._may_read(schema, depth):
            return None
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [value for value in values if isinstance(value, str)]
        if parts := _alternatives(schema):
            each = [self._texts(part, depth - 1) for part in parts]
            return None if None in each else list(dict.fromkeys(text for texts in each for text in texts or ()))
        for part in _list(schema.get("allOf")):
            if (texts := self._texts(part, depth - 1)) is not None:
                return texts
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and "type" not in schema:
            return self._texts(self._resolved(reference), depth - 1)
        types = self._types(schema, depth)
        return [] if types and "string" not in types else None

    def _may_read(self, schema: Mapping[str, Any], depth: int) -> bool:
        size = 1 + sum(len(_list(schema.get(word))) for word in _LISTS)
        self._parts_left -= size if depth else 0
        return depth > 0 and self._parts_left >= 0

    def _resolved(self, reference: str) -> Any:
        keys = reference[2:].split("/")
        self._parts_left -= len(keys)
        found: Any = self._root
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def _common(one: set[str], other: set[str]) -> set[str]:
    """Returns the types in both; an integer is a number."""
    both = _with_integers(one) & _with_integers(other)
    return both - {"integer"} if "number" in both else both


def _with_integers(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
