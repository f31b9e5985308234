"""Parsers of tool calls in the text of an answer.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them        Hermes, Qwen 2.5 and 3, SmolLM
    llama    {"name": "f", "parameters": {...}}, the whole answer, further ones after `;`        Llama 3.1 and later

White space around calls is dropped. Calls of unknown functions stay content.
"""

from collections.abc import Callable
from typing import Final

from phalanx_frontend.text.call_scanner import CallScanner
from phalanx_frontend.text.parts import Arguments, Content, MarkerScanner, Part, PartParser, ToolCall, text_part

HERMES_BEGIN: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"
LLAMA_MARK: Final = "<|python_tag|>"


class _Calls:
    """Numbers the calls of one answer."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._index = -1
        self._has_arguments = False
        self.scanner = CallScanner(names)
        self.raw = ""

    def open(self, raw: str) -> None:
        """Starts a call; `raw` is the text that announced it."""
        self.scanner = CallScanner(self._names)
        self.raw = raw
        self._has_arguments = False

    @property
    def is_reported(self) -> bool:
        """Whether the open call was reported as a part."""
        return self.scanner.is_certain

    def read(self, text: str) -> tuple[list[Part], str]:
        """Returns parts of the open call, and the text after it."""
        was_reported = self.is_reported
        taken, arguments = self.scanner.feed(text)
        self.raw += text[:taken]
        parts: list[Part] = []
        if self.scanner.name is not None and self.is_reported and not was_reported:
            self._index += 1
            parts.append(ToolCall(self._index, self.scanner.name))
        if self.scanner.is_done and not arguments and not self._has_arguments:
            arguments = "{}"
        if arguments:
            self._has_arguments = True
            parts.append(Arguments(self._index, arguments))
        return parts, text[taken:]


class HermesParser:
    """Parses calls between `<tool_call>` and `</tool_call>`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._marker = MarkerScanner(HERMES_BEGIN)
        self._calls = _Calls(names)
        self._is_inside = False
        self._blanks = ""
        self._follows_call = False
        self._tail: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether a possible call or white space is held back."""
        if not self._is_inside:
            return bool(self._blanks) or self._marker.is_holding
        return bool(self._tail) or not self._calls.is_reported

    def feed(self, text: str) -> list[Part]:
        """Returns the certain parts."""
        parts: list[Part] = []
        while text:
            if not self._is_inside:
                new_parts, text = self._outside(text)
            elif self._tail is None:
                new_parts, text = self._inside(text)
            else:
                new_parts, text = self._closing(text)
            parts += new_parts
        return parts

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        if self._is_inside:
            unfinished = self._calls.raw + (self._tail or "")
            return [] if self._calls.is_reported else self._content(unfinished)
        parts = self._content(self._marker.end())
        blanks, self._blanks = self._blanks, ""
        return parts if self._follows_call else parts + text_part(Content, blanks)

    def _outside(self, text: str) -> tuple[list[Part], str]:
        before, after = self._marker.feed(text)
        parts = self._content(before)
        if after is None:
            return parts, ""
        # White space before a call is dropped, unless it is no call.
        opened, self._blanks = self._blanks + HERMES_BEGIN, ""
        self._is_inside, self._tail = True, None
        self._calls.open(opened)
        return parts, after

    def _inside(self, text: str) -> tuple[list[Part], str]:
        parts, rest = self._calls.read(text)
        if self._calls.scanner.is_done:
            self._tail = ""
        elif self._calls.scanner.is_broken:
            self._is_inside = False
            if not self._calls.is_reported:
                raw = self._calls.raw
                parts += self._content(raw)
        return parts, rest

    def _closing(self, text: str) -> tuple[list[Part], str]:
        """Reads white space and `</tool_call>` after the object."""
        assert self._tail is not None, "only after the object"
        seen = self._tail + text
        bare = seen.lstrip()
        if HERMES_END.startswith(bare) and bare != HERMES_END:
            self._tail = seen
            return [], ""
        self._is_inside, self._tail, self._follows_call = False, None, True
        return [], bare.removeprefix(HERMES_END)

    def _content(self, text: str) -> list[Part]:
        """Returns content; trailing white space is held back."""
        text = self._blanks + text
        bare = text.rstrip()
        self._blanks = text[len(bare) :]
        self._follows_call = self._follows_call and not bare
        return text_part(Content, bare)


class LlamaParser:
    """Parses calls that form the whole answer."""

    def __init__(self, names: frozenset[str]) -> None:
        self._calls = _Calls(names)
        self._before = ""
        self._state = "start"

    @property
    def is_holding(self) -> bool:
        """Whether text of or between calls is held back."""
        return not self._calls.is_reported if self._state == "call" else bool(self._before)

    def feed(self, text: str) -> list[Part]:
        """Returns the certain parts."""
        if self._state == "content":
            return text_part(Content, text)
        parts: list[Part] = []
        while text and self._state != "content":
            new_parts, text = self._inside(text) if self._state == "call" else self._between(text)
            parts += new_parts
        return parts + text_part(Content, text)

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        if self._state == "call":
            return [] if self._calls.is_reported else text_part(Content, self._calls.raw)
        held, self._before = self._before, ""
        return text_part(Content, held) if held.strip() or self._state == "start" else []

    def _between(self, text: str) -> tuple[list[Part], str]:
        """Reads text before and between calls."""
        seen, self._before = self._before + text, ""
        bare = seen.lstrip() if self._state == "start" else seen.lstrip(" \t\r\n;")
        if self._state == "start":
            if LLAMA_MARK.startswith(bare) and bare != LLAMA_MARK:
                self._before = seen
                return [], ""
            bare = bare.removeprefix(LLAMA_MARK).lstrip()
        if not bare:
            self._before = seen
            return [], ""
        if not bare.startswith("{"):
            self._state = "content"
            return [], seen
        self._calls.open(seen[: len(seen) - len(bare)])
        self._state = "call"
        return [], bare

    def _inside(self, text: str) -> tuple[list[Part], str]:
        parts, rest = self._calls.read(text)
        if self._calls.scanner.is_done:
            self._state = "between"
        elif self._calls.scanner.is_broken:
            self._state = "content"
            rest = rest if self._calls.is_reported else self._calls.raw + rest
        return parts, rest


PARSERS: Final[dict[str, Callable[[frozenset[str]], PartParser]]] = {"hermes": HermesParser, "llama": LlamaParser}
"""Parsers by format, created with the names of functions."""


def detect_tool_format(template: str) -> str | None:
    """Returns the tool call format of a chat template."""
    if HERMES_BEGIN in template:
        return "hermes"
    if '"parameters"' in template and "tools" in template and ("ipython" in template or LLAMA_MARK in template):
        return "llama"
    return None
