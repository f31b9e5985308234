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


# Reasoning between `<think>` and `</think>`, as Qwen3 and DeepSeek-R1 write it, apart from the answer.
# Line ends next to the marks are layout and belong to neither side. Text before `<think>` that is more than white space means
# that the model does not think: all of it is content. Without `</think>` everything after `<think>` is reasoning.

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Splits one answer. `inside` says that the prompt ended with `<think>`, so the answer begins within the reasoning."""

    def __init__(self, inside: bool = False) -> None:
        self._is_inside = inside
        self._is_over = False
        self._before = ""
        self._marker = Marker(END)
        self._gap = ""
        self._at_start = True

    @property
    def is_holding(self) -> bool:
        """Whether a mark may have begun, or line ends wait for what follows them."""
        if self._is_over:
            return False
        return bool(self._gap) or self._marker.is_holding if self._is_inside else bool(self._before)

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if self._is_over:
            return said(Content, self._without_lead(text))
        return self._think(text) if self._is_inside else self._look(text)

    def end(self) -> list[Part]:
        """The parts of what was held back."""
        if self._is_over:
            return []
        if not self._is_inside:
            held, self._before = self._before, ""
            return said(Content, held)
        return self._reason(self._marker.end(), last=True)

    def _look(self, text: str) -> list[Part]:
        """Before it is known whether the model thinks."""
        self._before += text
        bare = self._before.lstrip()
        if bare.startswith(BEGIN):
            self._is_inside = True
            return self._think(bare[len(BEGIN) :])
        if BEGIN.startswith(bare):
            return []
        self._is_over, self._at_start = True, False
        held, self._before = self._before, ""
        return said(Content, held)

    def _think(self, text: str) -> list[Part]:
        before, after = self._marker.feed(text)
        parts = self._reason(before, last=after is not None)
        if after is None:
            return parts
        self._is_over, self._at_start = True, True
        return [*parts, *said(Content, self._without_lead(after))]

    def _reason(self, text: str, last: bool) -> list[Part]:
        """Reasoning without the line ends at its two sides, which are held back until more than line ends follows."""
        text = self._gap + self._without_lead(text)
        bare = text.rstrip("\n")
        self._gap = "" if last else text[len(bare) :]
        return said(Reasoning, bare)

    def _without_lead(self, text: str) -> str:
        """The text without line ends at the start of a side."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
