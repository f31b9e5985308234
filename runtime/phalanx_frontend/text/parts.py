"""What the text of a chat answer is made of: content, reasoning, tool calls. Parts come piece by piece, in order.

Parsers take text as it comes and give parts as soon as they are certain; how the text was cut never changes what they add up to.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the function `name` begins; calls of one answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of this call's arguments, as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | ToolCall | Arguments


class PartParser(Protocol):
    """Splits one answer's text into parts."""

    @property
    def is_holding(self) -> bool:
        """Whether some of the text fed so far may still become a part."""
        ...

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        ...

    def end(self) -> list[Part]:
        """The parts of what was held back, once no more text comes."""
        ...


class Chain:
    """A parser whose content goes through a second one: reasoning first, then tool calls."""

    def __init__(self, first: PartParser, second: PartParser) -> None:
        self._first = first
        self._second = second

    @property
    def is_holding(self) -> bool:
        """Whether either parser holds text back."""
        return self._first.is_holding or self._second.is_holding

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        return self._through(self._first.feed(text))

    def end(self) -> list[Part]:
        """The parts of what was held back."""
        return [*self._through(self._first.end()), *self._second.end()]

    def _through(self, parts: Iterable[Part]) -> list[Part]:
        through: list[Part] = []
        for part in parts:
            through += self._second.feed(part.text) if isinstance(part, Content) else [part]
        return through


class Marker:
    """Looks for one marker in a text that comes in pieces. Holds back no more than what may become the marker."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    @property
    def is_holding(self) -> bool:
        """Whether the text ends with what may become the marker."""
        return bool(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text before the marker that is certain, and what follows the marker; None while it was not seen."""
        text = self._held + text
        at = text.find(self._marker)
        if at >= 0:
            self._held = ""
            return text[:at], text[at + len(self._marker) :]
        held = next(size for size in range(min(len(self._marker) - 1, len(text)), -1, -1) if text.endswith(self._marker[:size]))
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def said(make: Callable[[str], Part], text: str) -> list[Part]:
    """One part of this text, or none when there is no text."""
    return [make(text)] if text else []
