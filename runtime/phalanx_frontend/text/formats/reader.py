"""Reads text that arrives in pieces, and writes the parts that it makes certain.

A format is a generator function over a `TextReader`. It reads by `yield from` and waits wherever more text is needed, so the
parts depend on the text alone, never on its pieces. Text that turns out to be no call becomes content:

    not reported    all text since `record` is content
    reported        the call ends where its text breaks, what follows is content
    cut off         a reported call stays unfinished, other text is content
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from phalanx_frontend.text.parts import Arguments, Content, Part, Reasoning, ToolCall
from phalanx_frontend.text.stop import longest_begin

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Yields while more text is needed."""
Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of parameters, by the names of functions that may be called."""
BLANKS = " \t\r\n"
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
MAX_NAME_CHARS = 192
"""Of a name with its prefix and number."""


class NotACallError(Exception):
    """The text is not a call."""


class TextEndedError(Exception):
    """The text ended where more is needed."""


class PartWriter:
    """The parts of one answer. White space before a call is dropped, and so is white space alone after it."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._arguments: list[str] = []
        self._index = -1
        self._blanks = ""
        self._newlines = ""
        self._follows_call = False

    @property
    def is_holding(self) -> bool:
        """Whether white space is held back."""
        return bool(self._blanks or self._newlines)

    def content(self, text: str) -> None:
        """Adds content, and holds trailing white space back."""
        text = self._blanks + text
        bare = text.rstrip()
        self._blanks = text[len(bare) :]
        if bare:
            self.plain(bare)

    def plain(self, text: str) -> None:
        """Adds content as it is."""
        self._follows_call = False
        self._add(Content(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning, and holds trailing newlines back."""
        text = self._newlines + text
        bare = text.rstrip("\n")
        self._newlines = text[len(bare) :]
        if bare:
            self._add(Reasoning(bare))

    def end_reasoning(self) -> None:
        """Drops the newlines held back."""
        self._newlines = ""

    def end_content(self) -> None:
        """Drops the white space held back."""
        self._blanks = ""

    def call(self, name: str, id: str | None = None) -> None:
        """Starts a call. `id`: as the model wrote it, if it did."""
        self._join_arguments()
        self._index += 1
        self._blanks, self._follows_call = "", True
        self._add(ToolCall(self._index, name, id))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the newest call."""
        if text:
            self._arguments.append(text)

    def flush_blanks(self) -> None:
        """Adds the white space held back, unless it follows a call."""
        blanks, self._blanks = self._blanks, ""
        if blanks and not self._follows_call:
            self._add(Content(blanks))

    def take(self) -> list[Part]:
        """Returns the new parts."""
        self._join_arguments()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, part: Part) -> None:
        self._join_arguments()
        self._parts.append(part)

    def _join_arguments(self) -> None:
        if self._arguments:
            self._parts.append(Arguments(self._index, "".join(self._arguments)))
            self._arguments = []


class TextReader(PartWriter):
    """Unread text, and the parts of the text read."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self.functions = functions
        self.has_ended = False
        self.is_reported = False  # the open call was written as a part
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None
        self._is_collecting = False

    @property
    def is_waiting(self) -> bool:
        """Whether text is held back."""
        is_undecided = self._at < len(self._text) or self._is_collecting
        return is_undecided or self.is_holding or bool(self._recorded)

    def add(self, text: str) -> None:
        """Adds text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def unread(self) -> str:
        """Returns the text that was not read."""
        return self._text[self._at :]

    def consume(self, count: int) -> str:
        """Reads `count` characters of the unread text."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def record(self, text: str = "") -> None:
        """Starts to record a possible call, after `text`."""
        self._recorded, self.is_reported = [text] if text else [], False

    def recorded(self) -> str:
        """Returns the recorded text, and ends the recording."""
        recorded, self._recorded = self._recorded or (), None
        return "".join(recorded)

    def report(self, name: str, id: str | None = None) -> None:
        """Writes the call of a known function as a part."""
        self._recorded, self.is_reported = None, True
        self.call(name, id)

    def close(self) -> None:
        """Drops a mark of the end of calls that is cut off."""
        self._recorded, self.is_reported = None, True

    def more(self) -> Wait[None]:
        """Waits for an unread character. Raises TextEndedError."""
        while self._at >= len(self._text):
            if self.has_ended:
                raise TextEndedError
            yield

    def peek(self) -> Wait[str]:
        """Returns the next character, without reading it. Raises TextEndedError."""
        yield from self.more()
        return self._text[self._at]

    def skip(self, chars: str = BLANKS) -> Wait[None]:
        """Reads any number of characters of `chars`. Raises TextEndedError."""
        while (yield from self.peek()) in chars:
            self.consume(1)

    def accept(self, *words: str) -> Wait[str | None]:
        """Reads and returns one of `words`, none of which begins another; null if none is next. Raises TextEndedError."""
        while True:
            for word in words:
                if self._text.startswith(word, self._at):
                    return self.consume(len(word))
            unread = self.unread()
            if not any(word.startswith(unread) for word in words):
                return None
            if self.has_ended:
                raise TextEndedError
            yield

    def expect(self, *words: str) -> Wait[str]:
        """Reads one of `words`. Raises NotACallError, TextEndedError."""
        word = yield from self.accept(*words)
        if word is None:
            raise NotACallError(f"none of {words}")
        return word

    def read_while(self, chars: frozenset[str]) -> Wait[str]:
        """Reads characters of `chars`, at most those of a name. Raises NotACallError, TextEndedError."""
        text = ""
        while (yield from self.peek()) in chars:
            text += self.consume(1)
            if len(text) > MAX_NAME_CHARS:
                raise NotACallError("too long for a name")
        return text

    def known_name(self) -> Wait[str]:
        """Reads the name of a function. Raises NotACallError, TextEndedError."""
        name = yield from self.read_while(NAME_CHARS)
        self.check_name(name)
        return name

    def check_name(self, name: str) -> None:
        """Raises NotACallError for an unknown function."""
        if name not in self.functions:
            raise NotACallError(f"no such function: {name}")

    def until(self, marks: Sequence[str], write: Callable[[str], object]) -> Wait[str]:
        """Passes text to `write` up to one of `marks`, and returns that. No mark is part of another. Raises TextEndedError."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
            if found:
                at, mark = min(found)
                self._pass(at - self._at, write)
                return self.consume(len(mark))
            unread = self.unread()
            held = 0 if self.has_ended else longest_begin(unread, marks)
            self._pass(len(unread) - held, write)
            if self.has_ended:
                raise TextEndedError
            yield

    def _pass(self, count: int, write: Callable[[str], object]) -> None:
        if count:
            write(self.consume(count))

    def collect_until(self, *marks: str) -> Wait[tuple[str, str]]:
        """Returns the text up to one of `marks`, and that mark. Raises TextEndedError."""
        pieces: list[str] = []
        with self.collecting():
            mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Reports text as held back."""
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def call_begin(self, *marks: str) -> Wait[str]:
        """Passes content up to the mark of a possible call, records and returns that. Raises TextEndedError."""
        mark = yield from self.until(marks, self.content)
        self.record(mark)
        return mark

    def attempt(self, call: Wait[None]) -> Wait[None]:
        """Reads a call; what is none becomes content. Raises TextEndedError."""
        try:
            yield from call
        except NotACallError:
            self.give_up()
        self._recorded, self.is_reported = None, False

    def give_up(self) -> None:
        """Makes content of the recorded text."""
        self.content(self.recorded())


Format = Callable[[TextReader], Wait[None]]
"""Reads an answer. Text after its end is content."""


class FormatParser:
    """Implements `phalanx_frontend.text.parts.PartParser` by a format."""

    def __init__(self, format: Format, functions: Functions) -> None:
        self._reader = TextReader(functions)
        self._waiting: Wait[None] | None = format(self._reader)
        self._advance()

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return self._reader.is_waiting

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that `text` makes certain."""
        if text:
            self._reader.add(text)
            self._advance()
        return self._reader.take()

    def end(self) -> list[Part]:
        """Returns the parts of the text held back."""
        reader = self._reader
        reader.has_ended = True
        self._advance()
        reader.flush_blanks()
        return reader.take()

    def _advance(self) -> None:
        reader = self._reader
        if self._waiting is not None:
            try:
                next(self._waiting)
                return
            except StopIteration:
                pass
            except TextEndedError:
                if not reader.is_reported:
                    reader.content(reader.recorded() + reader.consume(len(reader.unread())))
                return
            self._waiting = None
            reader.recorded()
        if rest := reader.consume(len(reader.unread())):
            reader.flush_blanks()
            reader.plain(rest)
