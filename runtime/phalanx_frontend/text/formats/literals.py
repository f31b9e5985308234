"""Formats of calls in literals: Python's, `[f(city="Paris")]`, and Gemma's, `call:f{city:<escape>Paris<escape>}`.

Values become JSON while they arrive. Python's white space and all forms of its strings and numbers are read, f-strings are not.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Final

from phalanx_frontend.text.formats.json_calls import call_list, json_sequence
from phalanx_frontend.text.formats.reader import MAX_NAME_CHARS, NAME_CHARS, Format, NotACallError, TextReader, Wait
from phalanx_frontend.text.formats.typed_values import NO_TYPES, string, value_json

PYTHON_BEGIN, PYTHON_END = "<|python_start|>", "<|python_end|>"
MAX_NESTING = 64
_WORD_CHARS = NAME_CHARS | frozenset("+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Delimiters of strings, and whether these have escapes and keys are strings, as in Python."""

    quotes: tuple[str, ...]
    is_python: bool


PYTHON: Final = Dialect(("'''", '"""', "'", '"'), is_python=True)


class LiteralReader:
    """Reads literals, and writes them as JSON into the arguments of the newest call."""

    def __init__(self, reader: TextReader, dialect: Dialect) -> None:
        self._reader = reader
        self._write = reader.arguments
        self._dialect = dialect

    def value(self, depth: int = 0) -> Wait[None]:
        """Reads one value. Raises NotACallError, TextEndedError."""
        reader = self._reader
        if depth > MAX_NESTING:
            raise NotACallError("too deep")
        yield from reader.skip()
        if quote := (yield from self._quote()):
            yield from self._string(quote)
            return
        match (yield from reader.peek()):
            case "[":
                yield from self._items("]", depth)
            case "(" if self._dialect.is_python:
                yield from self._items(")", depth)
            case "{":
                reader.consume(1)
                yield from self.members("}", depth)
            case _ if self._dialect.is_python:
                self._write(_word((yield from reader.read_while(_WORD_CHARS))))
            case _:
                self._write(value_json((yield from self._bare()).strip(), NO_TYPES))

    def _bare(self) -> Wait[str]:
        """Reads a number, a constant, or a string without delimiters."""
        reader, text = self._reader, ""
        while (yield from reader.peek()) not in ",}]":
            text += reader.consume(1)
            if len(text) > MAX_NAME_CHARS:
                raise NotACallError("too long for a value without delimiters")
        return text

    def _quote(self) -> Wait[str | None]:
        """Reads the beginning of a string; Python's longer quotes come first."""
        for quote in self._dialect.quotes:
            if (yield from self._reader.accept(quote)):
                return quote
        return None

    def _items(self, end: str, depth: int) -> Wait[None]:
        reader = self._reader
        reader.consume(1)
        self._write("[")
        before = ""
        while True:
            yield from reader.skip()
            if (yield from reader.accept(end)):
                break
            self._write(before)
            yield from self.value(depth + 1)
            before = ", "
            yield from reader.skip()
            if (yield from reader.expect(",", end)) == end:
                break
        self._write("]")

    def members(self, end: str, depth: int = 0) -> Wait[None]:
        """Reads keys and values up to `end`. Raises NotACallError, TextEndedError."""
        reader = self._reader
        self._write("{")
        before = ""
        while True:
            yield from reader.skip()
            if (yield from reader.accept(end)):
                break
            self._write(before)
            before = ", "
            if quote := (yield from self._quote()):
                yield from self._string(quote)
            elif self._dialect.is_python:
                raise NotACallError("a key that is no string")
            else:
                self._write(f'"{string((yield from reader.read_while(NAME_CHARS)))}"')
            yield from reader.skip()
            yield from reader.expect(":")
            self._write(": ")
            yield from self.value(depth + 1)
            yield from reader.skip()
            if (yield from reader.expect(",", end)) == end:
                break
        self._write("}")

    def _string(self, quote: str) -> Wait[None]:
        reader = self._reader
        self._write('"')
        marks = (quote, "\\") if self._dialect.is_python else (quote,)
        while (yield from reader.until(marks, lambda text: self._write(string(text)))) != quote:
            yield from self._escape()
        self._write('"')

    def _escape(self) -> Wait[None]:
        """Reads what follows a backslash. An unknown escape is its text, as in Python."""
        reader = self._reader
        char = yield from reader.peek()
        reader.consume(1)
        if char not in _HEX_DIGITS:
            self._write(string(_ESCAPES.get(char, "\\" + char)))
            return
        digits = ""
        while len(digits) < _HEX_DIGITS[char]:
            digit = yield from reader.peek()
            if digit not in "0123456789abcdefABCDEF":
                raise NotACallError("an escape without its digits")
            digits += reader.consume(1)
        if (code := int(digits, 16)) > 0x10FFFF:
            raise NotACallError("an escape beyond Unicode")
        self._write(string(chr(code)))


def _word(word: str) -> str:
    """Returns a constant or a number as JSON. Raises NotACallError."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        number: float = int(word, 0)
    except ValueError:
        try:
            number = float(word)
        except ValueError as error:
            raise NotACallError(f"{word!r} is no literal") from error
    if not math.isfinite(number):
        raise NotACallError(f"{word} is not JSON")
    return json.dumps(number)


def pythonic(reader: TextReader) -> Wait[None]:
    """Reads a list of calls that is the whole answer. Raises TextEndedError."""
    yield from reader.attempt(_pythonic_answer(reader))


def _pythonic_answer(reader: TextReader) -> Wait[None]:
    reader.record()
    yield from reader.skip()
    yield from _python_calls(reader)


def _python_calls(reader: TextReader) -> Wait[None]:
    yield from call_list(reader, _python_call)


def _python_call(reader: TextReader) -> Wait[None]:
    name = yield from reader.known_name()
    yield from reader.skip()
    yield from reader.expect("(")
    literals, before = LiteralReader(reader, PYTHON), "{"
    while True:
        yield from reader.skip()
        if (yield from reader.accept(")")):
            break
        key = yield from reader.read_while(NAME_CHARS)
        yield from reader.skip()
        if not key or not (yield from reader.accept("=")):
            raise NotACallError("an argument without its name")
        if before == "{":
            reader.report(name)
        reader.arguments(f'{before}"{key}": ')
        yield from literals.value()
        before = ", "
        yield from reader.skip()
        if (yield from reader.expect(",", ")")) == ")":
            break
    if before == "{":
        reader.report(name)
        reader.arguments("{")
    reader.arguments("}")


def llama4(reader: TextReader) -> Wait[None]:
    """Reads an answer of calls in Python or JSON, with or without `<|python_start|>`. Raises TextEndedError."""
    yield from reader.attempt(_llama4_answer(reader))
    while True:
        yield from reader.call_begin(PYTHON_BEGIN)
        yield from reader.attempt(_llama4_calls(reader))


def _llama4_answer(reader: TextReader) -> Wait[None]:
    reader.record()
    yield from reader.skip()
    yield from reader.accept(PYTHON_BEGIN)
    yield from _llama4_calls(reader)


def _llama4_calls(reader: TextReader) -> Wait[None]:
    yield from reader.skip()
    if (yield from reader.peek()) == "{":
        yield from json_sequence(reader)
    else:
        yield from _python_calls(reader)
        yield from reader.skip()
        yield from reader.accept(PYTHON_END)


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """Marks of a call, and of its strings."""

    begin: str
    end: str
    quote: str

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        return (self.begin, self.end, self.quote)


FUNCTION_GEMMA: Final = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4: Final = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma(marks: GemmaMarks) -> Format:
    """Returns the format of a Gemma with these marks."""
    dialect = Dialect((marks.quote,), is_python=False)

    def call(reader: TextReader) -> Wait[None]:
        yield from reader.skip()
        yield from reader.expect("call:")
        name = yield from reader.known_name()
        yield from reader.expect("{")
        reader.report(name)
        yield from LiteralReader(reader, dialect).members("}")
        yield from reader.skip()
        yield from reader.accept(marks.end)

    def read(reader: TextReader) -> Wait[None]:
        while True:
            yield from reader.call_begin(marks.begin)
            yield from reader.attempt(call(reader))

    return read
