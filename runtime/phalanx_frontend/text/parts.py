"""Parts of a chat answer, independent of how its text is split into pieces."""

from collections.abc import Callable, Iterable
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
    """Start of a call; `index` counts from 0."""

    index: int
    name: str


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


class MarkerScanner:
    """Searches for a marker in text pieces."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._pending = ""

    @property
    def is_holding(self) -> bool:
        """Whether the text ends with a possible marker."""
        return bool(self._pending)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns certain text before the marker, and text after it once found."""
        text = self._pending + text
        at = text.find(self._marker)
        if at >= 0:
            self._pending = ""
            return text[:at], text[at + len(self._marker) :]
        pending = next(
            size for size in range(min(len(self._marker) - 1, len(text)), -1, -1) if text.endswith(self._marker[:size])
        )
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending], None

    def end(self) -> str:
        """Returns the text held back."""
        pending, self._pending = self._pending, ""
        return pending


def text_part(make: Callable[[str], Part], text: str) -> list[Part]:
    """Returns one part, unless `text` is empty."""
    return [make(text)] if text else []


# Newlines next to the marks belong to neither part. Text before `<think>` makes the whole answer content.

THINK_BEGIN, THINK_END = "<think>", "</think>"


class ReasoningParser:
    """Splits reasoning between `<think>` and `</think>` from content. `inside`: the prompt ended with `<think>`."""

    def __init__(self, inside: bool = False) -> None:
        self._is_inside = inside
        self._is_done = False
        self._undecided = ""
        self._marker = MarkerScanner(THINK_END)
        self._newlines = ""
        self._at_start = True

    @property
    def is_holding(self) -> bool:
        """Whether a possible mark, or newlines, are held back."""
        if self._is_done:
            return False
        return bool(self._newlines) or self._marker.is_holding if self._is_inside else bool(self._undecided)

    def feed(self, text: str) -> list[Part]:
        """Returns the certain parts."""
        if self._is_done:
            return text_part(Content, self._strip_lead(text))
        return self._feed_reasoning(text) if self._is_inside else self._detect_start(text)

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        if self._is_done:
            return []
        if not self._is_inside:
            pending, self._undecided = self._undecided, ""
            return text_part(Content, pending)
        return self._reasoning(self._marker.end(), last=True)

    def _detect_start(self, text: str) -> list[Part]:
        """Decides whether the answer begins with `<think>`."""
        self._undecided += text
        bare = self._undecided.lstrip()
        if bare.startswith(THINK_BEGIN):
            self._is_inside = True
            return self._feed_reasoning(bare[len(THINK_BEGIN) :])
        if THINK_BEGIN.startswith(bare):
            return []
        self._is_done, self._at_start = True, False
        pending, self._undecided = self._undecided, ""
        return text_part(Content, pending)

    def _feed_reasoning(self, text: str) -> list[Part]:
        before, after = self._marker.feed(text)
        parts = self._reasoning(before, last=after is not None)
        if after is None:
            return parts
        self._is_done, self._at_start = True, True
        return [*parts, *text_part(Content, self._strip_lead(after))]

    def _reasoning(self, text: str, last: bool) -> list[Part]:
        """Returns reasoning without outer newlines."""
        text = self._newlines + self._strip_lead(text)
        bare = text.rstrip("\n")
        self._newlines = "" if last else text[len(bare) :]
        return text_part(Reasoning, bare)

    def _strip_lead(self, text: str) -> str:
        """Removes newlines at the start of a part."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
