"""The shape of records on the wire, written down so that those of two versions can be compared.

A later shape fits an earlier one when every record is still there under its tag, every field of it still there with its type (in
arrays at its place), and what was added has a default: then each side reads what the other one writes.
"""

from typing import Any

from msgspec import inspect

Shapes = dict[str, Any]
"""By record: its tag, whether it is an array, and its fields as (name, type, whether it must be there)."""


def shapes_of(*types: Any) -> Shapes:
    """The shapes of all records that these types name, directly or in fields."""
    found: Shapes = {}
    for info in inspect.multi_type_info(types):
        _describe(info, found)
    return found


def _describe(info: inspect.Type, found: Shapes) -> str:
    """A word for the type; notes the records in it."""
    match info:
        case inspect.StructType():
            return _note(info, found)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return f"list of {_describe(item, found)}"
        case inspect.TupleType(item_types=items):
            return f"tuple of {', '.join(_describe(item, found) for item in items)}"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map of {_describe(key, found)} to {_describe(value, found)}"
        case inspect.UnionType(types=types):
            return " or ".join(sorted(_describe(one, found) for one in types))
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(sorted(map(str, values)))}"
        case _:
            return type(info).__name__.removesuffix("Type").lower()


def _note(info: inspect.StructType, found: Shapes) -> str:
    name = info.cls.__name__
    if name not in found:
        shape = found[name] = {"tag": info.tag, "array": info.array_like, "fields": []}
        shape["fields"] = [[field.encode_name, _describe(field.type, found), field.required] for field in info.fields]
    return name


def differences(earlier: Shapes, later: Shapes) -> list[str]:
    """What makes a later shape not fit, as sentences."""
    wrong = [f"{name} is gone" for name in earlier if name not in later]
    for name in earlier.keys() & later.keys():
        before, after = earlier[name], later[name]
        if (before["tag"], before["array"]) != (after["tag"], after["array"]):
            wrong.append(f"{name} has another tag or form")
        wrong += _fields(name, before, after)
    return sorted(wrong)


def _fields(name: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    known = {field[0]: field for field in after["fields"]}
    places = {field[0]: place for place, field in enumerate(after["fields"])}
    wrong = []
    for place, (field, kind, _) in enumerate(before["fields"]):
        if field not in known:
            wrong.append(f"{name}.{field} is gone")
        elif known[field][1] != kind:
            wrong.append(f"{name}.{field} was {kind} and is {known[field][1]}")
        elif before["array"] and places[field] != place:
            wrong.append(f"{name}.{field} has another place")
    old = {field[0] for field in before["fields"]}
    added = [(field, required) for field, _, required in after["fields"] if field not in old]
    return wrong + [f"{name}.{field} is new and has no default" for field, required in added if required]


def tags_of(union: Any) -> set[str]:
    """The tags of the frames that one side may send."""
    (info,) = inspect.multi_type_info((union,))
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return {str(one.tag) for one in members if isinstance(one, inspect.StructType)}
