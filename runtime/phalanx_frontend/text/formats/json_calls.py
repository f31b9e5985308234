"""Formats of calls in JSON: an object with name and arguments, a list of these, or a name before its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from phalanx_frontend.text.formats.call_scanner import CallScanner
from phalanx_frontend.text.formats.reader import BLANKS, NAME_CHARS, Format, NotACallError, TextReader, Wait

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_MARK: Final = "<|python_tag|>"
TOOL_CALL: Final = "<|tool_call|>"
TOOL_CALL_ENDS: Final = ("<|/tool_call|>", "</|tool_call|>")
FUNCTOOLS: Final = "functools"
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_KIND: Final = "function"


def call_object(reader: TextReader) -> Wait[None]:
    """Reads `{"name": ..., "arguments": {...}}`. Raises NotACallError, TextEndedError."""
    scanner, has_arguments = CallScanner(reader.functions), False
    while not scanner.is_done:
        yield from reader.more()
        taken, arguments = scanner.feed(reader.unread())
        reader.consume(taken)
        if scanner.name is not None and scanner.is_certain and not reader.is_reported:
            reader.report(scanner.name)
        has_arguments = has_arguments or bool(arguments)
        reader.arguments(arguments)
        if scanner.is_broken:
            raise NotACallError
    if not has_arguments:
        reader.arguments("{}")


def call_objects(reader: TextReader) -> Wait[None]:
    """Reads `[{"name": ..., "arguments": {...}}, ...]`. Raises NotACallError, TextEndedError."""
    yield from call_list(reader, call_object)


def call_list(reader: TextReader, read_call: Callable[[TextReader], Wait[None]]) -> Wait[None]:
    """Reads calls in brackets, with commas between them. Raises NotACallError, TextEndedError."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip()
        yield from read_call(reader)
        reader.record()
        yield from reader.skip()
        if (yield from reader.expect(",", "]")) == "]":
            reader.close()
            return


def one_or_more(reader: TextReader) -> Wait[None]:
    """Reads an object, or a list of objects. Raises NotACallError, TextEndedError."""
    yield from reader.skip()
    yield from (call_objects if (yield from reader.peek()) == "[" else call_object)(reader)


def named_arguments(reader: TextReader, name: str, id: str | None = None) -> Wait[None]:
    """Reads an object, the arguments of `name`. Raises NotACallError, TextEndedError."""
    yield from reader.skip()
    if (yield from reader.peek()) != "{":
        raise NotACallError("no object")
    reader.report(name, id)
    yield from object_arguments(reader)


def object_arguments(reader: TextReader) -> Wait[None]:
    """Reads the rest of an object after its `{` as the arguments of the newest call. Raises TextEndedError."""
    depth, in_string, is_escaped = 0, False, False
    while True:
        yield from reader.more()
        for count, char in enumerate(reader.unread(), start=1):
            if in_string:
                in_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            else:
                in_string = char == '"'
                depth += (char in "{[") - (char in "}]")
                if not depth:
                    reader.arguments(reader.consume(count))
                    return
        reader.arguments(reader.consume(count))


def marked(begins: tuple[str, ...], ends: tuple[str, ...]) -> Format:
    """Returns a format with calls anywhere in the text. An end may be missing."""

    def call(reader: TextReader) -> Wait[None]:
        yield from one_or_more(reader)
        yield from reader.skip()
        yield from reader.accept(*ends)

    def read(reader: TextReader) -> Wait[None]:
        while True:
            yield from reader.call_begin(*begins)
            yield from reader.attempt(call(reader))

    return read


def llama(reader: TextReader) -> Wait[None]:
    """Reads calls that are the whole answer, separated by `;`. Raises TextEndedError."""
    yield from reader.attempt(_llama_calls(reader))


def _llama_calls(reader: TextReader) -> Wait[None]:
    reader.record()
    yield from reader.skip()
    yield from reader.accept(LLAMA_MARK)
    yield from json_sequence(reader)


def json_sequence(reader: TextReader) -> Wait[None]:
    """Reads objects up to the end of the text. Raises NotACallError, TextEndedError."""
    while True:
        yield from call_object(reader)
        reader.record()
        yield from reader.skip(BLANKS + ";")


def mistral(reader: TextReader) -> Wait[None]:
    """Reads `[TOOL_CALLS]` with a list of objects, or with a name and its arguments. Raises TextEndedError."""
    while True:
        yield from reader.call_begin(MISTRAL_BEGIN)
        yield from reader.attempt(_mistral_call(reader))


def _mistral_call(reader: TextReader) -> Wait[None]:
    yield from reader.skip()
    if (yield from reader.peek()) in "[{":
        yield from one_or_more(reader)
        return
    name, id = (yield from reader.known_name()), None
    if (yield from reader.accept(MISTRAL_ID)):
        id = yield from reader.read_while(NAME_CHARS)
    yield from reader.accept(MISTRAL_ARGS)
    yield from named_arguments(reader, name, id)


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """Marks of a section of calls."""

    section: str
    call: str
    head_end: str
    """Between the name and the arguments."""
    call_end: str
    section_end: str

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        return (self.section, self.call, self.head_end, self.call_end, self.section_end)


DEEPSEEK: Final = SectionMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
KIMI: Final = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def sections(marks: SectionMarks, call: Callable[[TextReader], Wait[None]]) -> Format:
    """Returns a format with sections of calls. `call` reads what is inside the marks of one."""

    def calls(reader: TextReader, mark: str) -> Wait[None]:
        if mark == marks.section:
            yield from reader.skip()
            yield from reader.expect(marks.call)
        while True:
            yield from call(reader)
            yield from reader.skip()
            yield from reader.accept(marks.call_end)
            reader.record()
            yield from reader.skip()
            if (yield from reader.accept(marks.call, marks.section_end)) != marks.call:
                return

    def read(reader: TextReader) -> Wait[None]:
        while True:
            mark = yield from reader.call_begin(marks.section, marks.call)
            yield from reader.attempt(calls(reader, mark))

    return read


def deepseek_v3_call(reader: TextReader) -> Wait[None]:
    """Reads the kind, the name, and the arguments in a fenced block. Raises NotACallError, TextEndedError."""
    yield from reader.skip()
    yield from reader.expect(DEEPSEEK_KIND)
    yield from reader.expect(DEEPSEEK.head_end)
    name = yield from reader.known_name()
    yield from reader.skip()
    yield from reader.accept("```json")
    yield from named_arguments(reader, name)
    yield from reader.skip()
    yield from reader.accept("```")


def deepseek_v31_call(reader: TextReader) -> Wait[None]:
    """Reads the name and the arguments. Raises NotACallError, TextEndedError."""
    yield from reader.skip()
    name = yield from reader.known_name()
    yield from reader.expect(DEEPSEEK.head_end)
    yield from named_arguments(reader, name)


def kimi_call(reader: TextReader) -> Wait[None]:
    """Reads an id, `functions.NAME:NUMBER`, and the arguments. Raises NotACallError, TextEndedError."""
    yield from reader.skip()
    id = yield from reader.read_while(NAME_CHARS | {":"})
    name = id.removeprefix("functions.").rpartition(":")[0]
    reader.check_name(name)
    yield from reader.skip()
    yield from reader.expect(KIMI.head_end)
    yield from named_arguments(reader, name, id)
