"""The records of the version before, made anew of the recorded shapes: they read what its programs read, and know no more."""

import functools
import operator
from collections.abc import Callable
from types import GenericAlias
from typing import Any, Literal

import msgspec

from tests.protocol.old_leader import RECORDED

_SHAPES = RECORDED["shapes"]
_PLAIN: dict[str, Any] = {"bool": bool, "bytes": bytes, "float": float, "int": int, "str": str}
_LITERAL: Any = Literal


@functools.cache
def record(name: str) -> Any:
    """The record of this name. A field that may be left out is UNSET then: its default was not recorded."""
    shape = _SHAPES[name]
    fields = [(field, _type(words), *(() if required else (msgspec.UNSET,))) for field, words, required in shape["fields"]]
    return msgspec.defstruct(name, fields, tag=shape["tag"], array_like=shape["array"])


def _type(words: str) -> Any:
    """The type that `shapes` has these words for."""
    for optional in (words.removeprefix("none or "), words.removesuffix(" or none")):
        if optional != words:
            return _type(optional) | None
    kind, _, rest = words.partition(" of ")
    match kind:
        case "list":
            return GenericAlias(list, (_type(rest),))
        case "tuple":
            return GenericAlias(tuple, tuple(_type(one) for one in rest.split(", ")))
        case "map":
            return GenericAlias(dict, tuple(_type(one) for one in rest.split(" to ")))
        case "one":
            return _LITERAL[tuple(rest.split(", "))]
        case _:
            return _PLAIN[words] if words in _PLAIN else record(words)


def peer_reader() -> Callable[[bytes], Any]:
    """What reads a frame that a router of the version before may get from another. Raises msgspec.DecodeError."""
    tags = RECORDED["frames"]["peer"]
    kinds = [record(name) for name, shape in _SHAPES.items() if shape["tag"] in tags]
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, kinds)).decode


def same_fields(earlier: Any, later: Any) -> bool:
    """Whether the later record says in each field that the earlier one has what the earlier one says."""
    if not isinstance(earlier, msgspec.Struct):
        return bool(earlier == later)
    return all(same_fields(getattr(earlier, field), getattr(later, field)) for field in earlier.__struct_fields__)
