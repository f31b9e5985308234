"""Mutations of JSON documents and of bytes: values at the edge of a type, wrong types, deep nesting, cut and repeated parts."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63) - 1, 2**64 - 1, 2**64, 10**30, 10**400),
)
FLOATS = (0.0, -0.0, 0.5, 1.5, 1e-300, 1e300, -1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *(
        "",
        " ",
        "x",
        "\0",
        "\ud800",
        "\udc00\ud800",
        "🦊",
        "é",
        "\u202e",
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "%00%ff",
        "{{ 7*7 }}",
    ),
    *(
        "null",
        "true",
        "1",
        "-1",
        "1e400",
        "NaN",
        "\n",
        "\r\n",
        "<|im_start|>",
        "x" * 3000,
        "🦊" * 800,
        "${x}",
        "'\"",
        "\\",
        "Ā" * 300,
    ),
)
NUMBER_MARK = "@number:"
HUGE_NUMBERS = ("1e400", "-1e400", "1" * 5000, "0." + "0" * 400 + "1", "-0", "1E+999999999", "00", "1.", "0x10")
"""Written as they are: Python has no such values, or writes them otherwise."""
MAX_DEPTH = 3000


def edge_value(draw: Random) -> Any:
    """Returns a value at the edge of a JSON type."""
    match draw.randrange(9):
        case 0 | 1:
            return draw.choice(INTEGERS)
        case 2:
            return draw.choice(FLOATS)
        case 3 | 4:
            return draw.choice(TEXTS)
        case 5:
            return draw.choice((None, True, False))
        case 6:
            return draw.choice(([], {}, [[]], {"": ""}, [None], {"a": {"b": []}}, [1, "a", None], ["x"] * 300, [0] * 2000))
        case 7:
            return NUMBER_MARK + draw.choice(HUGE_NUMBERS)
        case _:
            return nested(draw.choice(("list", "object")), draw.choice((5, 60, 200, 900)))


def nested(kind: str, depth: int) -> Any:
    """Returns a document of `depth` levels."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container with each of its keys or positions, without recursion."""
    waiting = [document]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            if isinstance(node[key], dict | list):
                waiting.append(node[key])


def mutate_document(draw: Random, document: Any, times: int) -> Any:
    """Returns the document, changed in place at `times` places; a document without places is replaced."""
    for _ in range(times):
        found = list(places(document))
        if not found or draw.random() < 0.02:
            return edge_value(draw)
        node, key = draw.choice(found)
        match draw.randrange(8):
            case 0 | 1 | 2 | 3:
                node[key] = edge_value(draw)
            case 4:
                del node[key]
            case 5:
                other, name = draw.choice(found)
                try:
                    node[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else None))
                except RecursionError:  # mutated before
                    node[key] = None
            case 6:
                _add(draw, node, node[key])
            case _:
                node[key] = [node[key]] if draw.random() < 0.5 else {"a": node[key]}
    return document


def _add(draw: Random, node: Any, value: Any) -> None:
    if isinstance(node, list):
        node.extend([value] * draw.choice((1, 2, 50)))
    else:
        node[draw.choice(("extra", "", "\ud800", "x" * 300, "__class__", "type", "$ref", "n"))] = edge_value(draw)


def encode_document(document: Any) -> bytes:
    """Returns the JSON text, with the numbers that Python does not write; nesting that Python cannot write is a bare list."""
    try:
        text = json.dumps(document)
    except RecursionError:
        text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for number in HUGE_NUMBERS:
        text = text.replace(f'"{NUMBER_MARK}{number}"', number)
    return text.encode()


def mutate_bytes(draw: Random, content: bytes) -> bytes:
    """Returns the content with flipped, removed, repeated or inserted bytes."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        if not data:
            return bytes(data)
        at = draw.randrange(len(data))
        match draw.randrange(6):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at] = draw.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + draw.choice((1, 2, 8, 100))]
            case 4:
                data[at:at] = data[at : at + draw.choice((1, 4, 64, 1000))]
            case _:
                data[at:at] = draw.choice(
                    (b"\0", b"\xff" * 8, b"\xed\xa0\x80", b"\r\n", b"{", b"[" * 2000, b'"', draw.randbytes(9))
                )
    return bytes(data)
