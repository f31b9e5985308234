"""Parts of the text of a chat answer: content, reasoning, tool calls.

Parsers receive text in pieces and return parts as soon as they are certain. How the text is split never changes the joined parts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text, before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Start of a call of the function `name`. `index` numbers the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More JSON text of the arguments of call `index`, as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | ToolCall | Arguments


class PartParser(Protocol):
    """Splits one answer's text into parts."""

    @property
    def is_holding(self) -> bool:
        """Whether some text fed so far is held back."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        ...

    def end(self) -> list[Part]:
        """Returns the parts of the text held back, at the end of the text."""
        ...


class ParserChain:
    """Feeds the content of a first parser to a second one: reasoning first, then tool calls."""

    def __init__(self, first: PartParser, second: PartParser) -> None:
        self._first = first
        self._second = second

    @property
    def is_holding(self) -> bool:
        """Whether either parser holds text back."""
        return self._first.is_holding or self._second.is_holding

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        return self._through(self._first.feed(text))

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        return [*self._through(self._first.end()), *self._second.end()]

    def _through(self, parts: Iterable[Part]) -> list[Part]:
        through: list[Part] = []
        for part in parts:
            through += self._second.feed(part.text) if isinstance(part, Content) else [part]
        return through


class MarkerScanner:
    """Searches for one marker in text that arrives in pieces. Holds back only what may become the marker."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    @property
    def is_holding(self) -> bool:
        """Whether the text ends with a beginning of the marker."""
        return bool(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns certain text before the marker, and the text after it; None while the marker was not found."""
        text = self._held + text
        at = text.find(self._marker)
        if at >= 0:
            self._held = ""
            return text[:at], text[at + len(self._marker) :]
        held = next(size for size in range(min(len(self._marker) - 1, len(text)), -1, -1) if text.endswith(self._marker[:size]))
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def end(self) -> str:
        """Returns the text held back."""
        held, self._held = self._held, ""
        return held


def text_part(make: Callable[[str], Part], text: str) -> list[Part]:
    """Returns one part made of `text`, or an empty list if `text` is empty."""
    return [make(text)] if text else []


# Reasoning between `<think>` and `</think>`, as Qwen3 and DeepSeek-R1 write it.
# Newlines next to the marks belong to neither part. If text other than white space precedes `<think>`, the whole answer is
# content.
# Without `</think>` everything after `<think>` is reasoning.

THINK_BEGIN, THINK_END = "<think>", "</think>"


class ReasoningParser:
    """Splits reasoning from content. `inside`: the prompt ended with `<think>`, so the answer begins with reasoning."""

    def __init__(self, inside: bool = False) -> None:
        self._is_inside = inside
        self._is_over = False
        self._before = ""
        self._marker = MarkerScanner(THINK_END)
        self._gap = ""
        self._at_start = True

    @property
    def is_holding(self) -> bool:
        """Whether a mark may have begun, or newlines are held back."""
        if self._is_over:
            return False
        return bool(self._gap) or self._marker.is_holding if self._is_inside else bool(self._before)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        if self._is_over:
            return text_part(Content, self._without_lead(text))
        return self._think(text) if self._is_inside else self._look(text)

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        if self._is_over:
            return []
        if not self._is_inside:
            held, self._before = self._before, ""
            return text_part(Content, held)
        return self._reason(self._marker.end(), last=True)

    def _look(self, text: str) -> list[Part]:
        """Decides whether the answer begins with `<think>`."""
        self._before += text
        bare = self._before.lstrip()
        if bare.startswith(THINK_BEGIN):
            self._is_inside = True
            return self._think(bare[len(THINK_BEGIN) :])
        if THINK_BEGIN.startswith(bare):
            return []
        self._is_over, self._at_start = True, False
        held, self._before = self._before, ""
        return text_part(Content, held)

    def _think(self, text: str) -> list[Part]:
        before, after = self._marker.feed(text)
        parts = self._reason(before, last=after is not None)
        if after is None:
            return parts
        self._is_over, self._at_start = True, True
        return [*parts, *text_part(Content, self._without_lead(after))]

    def _reason(self, text: str, last: bool) -> list[Part]:
        """Returns reasoning without outer newlines; trailing ones are held back until other text follows."""
        text = self._gap + self._without_lead(text)
        bare = text.rstrip("\n")
        self._gap = "" if last else text[len(bare) :]
        return text_part(Reasoning, bare)

    def _without_lead(self, text: str) -> str:
        """Returns `text` without newlines at the start of a part."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
