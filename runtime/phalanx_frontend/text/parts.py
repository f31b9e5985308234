"""Parts of a chat answer, independent of how its text is split into pieces."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Start of a call; `index` counts from 0. `id`: as the model wrote it, if it did."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """More JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | ToolCall | Arguments


class PartParser(Protocol):
    """Splits one answer's text into parts."""

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        ...

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        ...


class ParserChain:
    """Two parsers in sequence."""

    def __init__(self, first: PartParser, second: PartParser) -> None:
        self._first = first
        self._second = second

    @property
    def is_holding(self) -> bool:
        """Whether either parser holds text back."""
        return self._first.is_holding or self._second.is_holding

    def feed(self, text: str) -> list[Part]:
        """Returns the certain parts."""
        return self._through(self._first.feed(text))

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        return [*self._through(self._first.end()), *self._second.end()]

    def _through(self, parts: Iterable[Part]) -> list[Part]:
        through: list[Part] = []
        for part in parts:
            through += self._second.feed(part.text) if isinstance(part, Content) else [part]
        return through
