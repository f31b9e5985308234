"""Parts of answers in pieces, and the calls in them."""

import json
from itertools import pairwise
from typing import Any

from phalanx_frontend.text.parts import Arguments, Content, Part, PartParser, Reasoning, ToolCall


def joined(parts: list[Part]) -> list[Part]:
    """Joins neighbouring parts of one kind."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match last, part:
            case (Content(a), Content(b)):
                whole[-1] = Content(a + b)
            case (Reasoning(a), Reasoning(b)):
                whole[-1] = Reasoning(a + b)
            case (Arguments(i, a), Arguments(j, b)) if i == j:
                whole[-1] = Arguments(i, a + b)
            case _:
                whole.append(part)
    return whole


def parse(parser: PartParser, pieces: list[str]) -> list[Part]:
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.end())


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(at)]


def read_calls(parts: list[Part]) -> list[tuple[str, dict[str, Any]]]:
    names = {part.index: part.name for part in parts if isinstance(part, ToolCall)}
    arguments = {part.index: json.loads(part.text) for part in parts if isinstance(part, Arguments)}
    assert list(names) == list(range(len(names)))
    return [(names[index], arguments[index]) for index in names]
