"""Formats of calls with a tag for each parameter: those of Qwen3-Coder and GLM-4.5.

A value has the type of its parameter's schema. Texts are streamed, other values are written once they are complete.
"""

from phalanx_frontend.text.formats.json_calls import HERMES_BEGIN, HERMES_END
from phalanx_frontend.text.formats.reader import NAME_CHARS, TextReader, Wait
from phalanx_frontend.text.formats.typed_values import Parameters, string, value_json

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class ParameterWriter:
    """Writes the arguments of one call as a JSON object."""

    def __init__(self, reader: TextReader, name: str) -> None:
        self._reader = reader
        self._schema = reader.functions[name]
        self._is_first = True
        reader.report(name)

    def end(self) -> None:
        """Ends the object."""
        self._reader.arguments("{}" if self._is_first else "}")

    def value(self, key: str, end: str, has_lines: bool) -> Wait[None]:
        """Reads a value up to `end`. Raises TextEndedError.

        `has_lines`: of Qwen3-Coder, where one newline before and after a value is not part of it, and a value without types is a
        text. GLM-4.5 writes JSON there.
        """
        types = Parameters(self._schema).types(key)
        self._reader.arguments(f'{"{" if self._is_first else ", "}"{string(key)}": ')
        self._is_first = False
        if types == {"string"} or (has_lines and not types):
            yield from self._text(end, has_lines)
            return
        text, _ = yield from self._reader.collect_until(end)
        if has_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._reader.arguments(value_json(text, types))

    def _text(self, end: str, has_lines: bool) -> Wait[None]:
        reader, newline = self._reader, ""

        def write(text: str) -> None:
            nonlocal newline
            text = newline + text
            newline = "\n" if has_lines and text.endswith("\n") else ""
            reader.arguments(string(text.removesuffix(newline)))

        reader.arguments('"')
        if has_lines and (yield from reader.peek()) == "\n":
            reader.consume(1)
        yield from reader.until((end,), write)
        reader.arguments('"')


def qwen3_coder(reader: TextReader) -> Wait[None]:
    """Reads `<tool_call>` with a function and its parameters; the outer tag may be missing. Raises TextEndedError."""
    while True:
        mark = yield from reader.call_begin(HERMES_BEGIN, FUNCTION)
        yield from reader.attempt(_qwen3_coder_call(reader, mark))


def _qwen3_coder_call(reader: TextReader, mark: str) -> Wait[None]:
    if mark != FUNCTION:
        yield from reader.skip()
        yield from reader.expect(FUNCTION)
    name = yield from reader.known_name()
    yield from reader.expect(">")
    arguments = ParameterWriter(reader, name)
    while True:
        yield from reader.skip()
        if (yield from reader.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            break
        key, _ = yield from reader.collect_until(">")
        yield from arguments.value(key, PARAMETER_END, has_lines=True)
    arguments.end()
    yield from reader.skip()
    yield from reader.accept(HERMES_END)


def glm45(reader: TextReader) -> Wait[None]:
    """Reads `<tool_call>` with a name, keys and values. Raises TextEndedError."""
    while True:
        yield from reader.call_begin(HERMES_BEGIN)
        yield from reader.attempt(_glm45_call(reader))


def _glm45_call(reader: TextReader) -> Wait[None]:
    yield from reader.skip()
    name = yield from reader.read_while(NAME_CHARS)
    reader.check_name(name)
    yield from reader.skip()
    mark = yield from reader.expect(KEY, HERMES_END)
    arguments = ParameterWriter(reader, name)
    while mark == KEY:
        key, _ = yield from reader.collect_until(KEY_END)
        yield from reader.skip()
        yield from reader.expect(VALUE)
        yield from arguments.value(key.strip(), VALUE_END, has_lines=False)
        yield from reader.skip()
        mark = yield from reader.expect(KEY, HERMES_END)
    arguments.end()
