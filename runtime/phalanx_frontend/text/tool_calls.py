"""Tool calls in the text of an answer, by the way in which a model writes them.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them    Hermes, Qwen 2.5 and 3, SmolLM
    llama    {"name": "f", "parameters": {...}}, the whole answer, more of them after `;`     Llama 3.1 and later

White space around calls is layout. What looks like a call and is none, or calls what the request does not offer, stays content,
every character of it.
"""

from collections.abc import Callable
from typing import Final

from phalanx_frontend.text.call_scanner import CallScanner
from phalanx_frontend.text.parts import Arguments, Content, Marker, Part, PartParser, ToolCall, said

HERMES_BEGIN: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"
LLAMA_MARK: Final = "<|python_tag|>"


class _Calls:
    """What both formats share: numbering calls, and reading the one that is open. `raw` is what it was read from."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._index = -1
        self._has_arguments = False
        self.scanner = CallScanner(names)
        self.raw = ""

    def open(self, raw: str) -> None:
        """Begins to read a call; `raw` is the text that announced it."""
        self.scanner = CallScanner(self._names)
        self.raw = raw
        self._has_arguments = False

    @property
    def is_told(self) -> bool:
        """Whether the open call was told of."""
        return self.scanner.is_certain

    def read(self, text: str) -> tuple[list[Part], str]:
        """Parts of the open call, and the text after it, or after the last character that belongs to it when it is broken."""
        was_told = self.is_told
        taken, arguments = self.scanner.feed(text)
        self.raw += text[:taken]
        parts: list[Part] = []
        if self.scanner.name is not None and self.is_told and not was_told:
            self._index += 1
            parts.append(ToolCall(self._index, self.scanner.name))
        if self.scanner.is_done and not arguments and not self._has_arguments:
            arguments = "{}"
        if arguments:
            self._has_arguments = True
            parts.append(Arguments(self._index, arguments))
        return parts, text[taken:]


class HermesParser:
    """Calls between `<tool_call>` and `</tool_call>`; the text around them is content."""

    def __init__(self, names: frozenset[str]) -> None:
        self._marker = Marker(HERMES_BEGIN)
        self._calls = _Calls(names)
        self._is_inside = False
        self._gap = ""
        self._follows_call = False
        self._tail: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether a call may have begun, or white space waits for what follows it."""
        if not self._is_inside:
            return bool(self._gap) or self._marker.is_holding
        return bool(self._tail) or not self._calls.is_told

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        parts: list[Part] = []
        while text:
            if not self._is_inside:
                more, text = self._outside(text)
            elif self._tail is None:
                more, text = self._inside(text)
            else:
                more, text = self._closing(text)
            parts += more
        return parts

    def end(self) -> list[Part]:
        """The parts of what was held back."""
        if self._is_inside:
            unfinished = self._calls.raw + (self._tail or "")
            return [] if self._calls.is_told else self._content(unfinished)
        parts = self._content(self._marker.end())
        gap, self._gap = self._gap, ""
        return parts if self._follows_call else parts + said(Content, gap)

    def _outside(self, text: str) -> tuple[list[Part], str]:
        before, after = self._marker.feed(text)
        parts = self._content(before)
        if after is None:
            return parts, ""
        # White space before a call is layout, unless it turns out to be none.
        opened, self._gap = self._gap + HERMES_BEGIN, ""
        self._is_inside, self._tail = True, None
        self._calls.open(opened)
        return parts, after

    def _inside(self, text: str) -> tuple[list[Part], str]:
        parts, rest = self._calls.read(text)
        if self._calls.scanner.is_done:
            self._tail = ""
        elif self._calls.scanner.is_broken:
            self._is_inside = False
            if not self._calls.is_told:
                raw = self._calls.raw
                parts += self._content(raw)
        return parts, rest

    def _closing(self, text: str) -> tuple[list[Part], str]:
        """After the object: white space and `</tool_call>`; anything else belongs to the answer again."""
        assert self._tail is not None, "only after the object"
        seen = self._tail + text
        bare = seen.lstrip()
        if HERMES_END.startswith(bare) and bare != HERMES_END:
            self._tail = seen
            return [], ""
        self._is_inside, self._tail, self._follows_call = False, None, True
        return [], bare.removeprefix(HERMES_END)

    def _content(self, text: str) -> list[Part]:
        """Content with the white space before it; white space at its end waits for what follows."""
        text = self._gap + text
        bare = text.rstrip()
        self._gap = text[len(bare) :]
        self._follows_call = self._follows_call and not bare
        return said(Content, bare)


class LlamaParser:
    """Calls as the whole answer. An answer that does not begin with one is content."""

    def __init__(self, names: frozenset[str]) -> None:
        self._calls = _Calls(names)
        self._before = ""
        self._state = "start"

    @property
    def is_holding(self) -> bool:
        """Whether a call may have begun, or text between two waits for what follows it."""
        return not self._calls.is_told if self._state == "call" else bool(self._before)

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if self._state == "content":
            return said(Content, text)
        parts: list[Part] = []
        while text and self._state != "content":
            more, text = self._inside(text) if self._state == "call" else self._between(text)
            parts += more
        return parts + said(Content, text)

    def end(self) -> list[Part]:
        """The parts of what was held back."""
        if self._state == "call":
            return [] if self._calls.is_told else said(Content, self._calls.raw)
        held, self._before = self._before, ""
        return said(Content, held) if held.strip() or self._state == "start" else []

    def _between(self, text: str) -> tuple[list[Part], str]:
        """Before the first call, or between two."""
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
            rest = rest if self._calls.is_told else self._calls.raw + rest
        return parts, rest


PARSERS: Final[dict[str, Callable[[frozenset[str]], PartParser]]] = {"hermes": HermesParser, "llama": LlamaParser}
"""Parsers by format. They are given the names of the functions that may be called."""


def format_of(template: str) -> str | None:
    """The format in which a chat template asks the model to call tools, or None when it knows of none."""
    if HERMES_BEGIN in template:
        return "hermes"
    if '"parameters"' in template and "tools" in template and ("ipython" in template or LLAMA_MARK in template):
        return "llama"
    return None
