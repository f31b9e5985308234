"""The format of gpt-oss, harmony: an answer of messages, each with a header.

    <|channel|>analysis<|message|>...<|end|>                                        reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                      content
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>  a call
    <|channel|>commentary<|message|>...                                             content, which precedes calls

The prompt ends with `<|start|>assistant`, or inside of a final message that the answer continues. Messages of one kind are
separated by a newline. Text outside of messages is content; a header that is cut off is none.
"""

import re
from typing import Final

from phalanx_frontend.text.formats.json_calls import object_arguments
from phalanx_frontend.text.formats.reader import TextEndedError, TextReader, Wait

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
RECIPIENT: Final = " to="
FUNCTIONS: Final = "functions."
MAX_HEADER_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def harmony(reader: TextReader) -> Wait[None]:
    """Reads messages. Raises TextEndedError."""
    yield from _messages(reader, (yield from reader.accept(START, CHANNEL, MESSAGE, RECIPIENT)), set())


def continued_harmony(reader: TextReader) -> Wait[None]:
    """Reads the rest of a final message, and further messages. Raises TextEndedError."""
    yield from _messages(reader, None, {"content"})


def _messages(reader: TextReader, opener: str | None, separated: set[str]) -> Wait[None]:
    """Reads messages. `opener`: the mark of the first one, if it was read. `separated`: kinds that a newline precedes."""
    while True:
        if opener is None:
            opener = yield from reader.until((START, CHANNEL, *ENDS), reader.content)
        if opener in ENDS:
            opener = None
            continue
        header = opener if opener == MESSAGE else (yield from _header(reader, opener))
        opener = yield from _body(reader, header, separated)


def _header(reader: TextReader, opener: str) -> Wait[str]:
    pieces = [opener]
    try:
        with reader.collecting():
            yield from reader.until((MESSAGE,), pieces.append)
    except TextEndedError:
        if sum(map(len, pieces)) > MAX_HEADER_CHARS:
            reader.content("".join(pieces))
        raise
    return "".join(pieces)


def _body(reader: TextReader, header: str, separated: set[str]) -> Wait[str | None]:
    """Reads the body of a message, and returns the mark of the next one if it was read with it."""
    found, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    name = recipient[1].removeprefix(FUNCTIONS) if recipient is not None else None
    if name is not None and name in reader.functions:
        mark = yield from _call(reader, name)
        reader.is_reported = False
        if mark is not None:
            return None
    is_reasoning = found is not None and found[1] == "analysis"
    kind, write = ("reasoning", reader.reasoning) if is_reasoning else ("content", reader.content)
    if name is None:
        if kind in separated:
            write("\n")
        separated.add(kind)
    mark = yield from reader.until((START, *ENDS), write)
    reader.end_reasoning()
    return mark if mark == START else None


def _call(reader: TextReader, name: str) -> Wait[str | None]:
    """Reads the arguments of a call, and returns the mark of its end if it was read with them. Other text is no call."""
    try:
        yield from reader.skip()
        if (yield from reader.peek()) == "{":
            reader.report(name)
            yield from object_arguments(reader)
            yield from reader.skip()
            return None
        mark = yield from reader.accept(*ENDS)
    except TextEndedError:
        if not reader.is_reported:  # `<|call|>` is a stop token, which has no text
            reader.report(name)
            reader.arguments("{}")
        raise
    if mark is not None:
        reader.report(name)
        reader.arguments("{}")
    return mark
