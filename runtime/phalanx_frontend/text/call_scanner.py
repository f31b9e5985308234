"""Reads one JSON tool call, `{"name": ..., "arguments": {...}}`, character by character, and streams its arguments.

Arguments that are an object are passed on as the model wrote them, without parsing: re-encoding could lose text, and a mistake of
the model inside them stays visible. Arguments written as a string must contain the text of an object. Keys may come in any order,
once each; other keys are skipped.
"""

import json
from collections.abc import Callable
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
"""Hermes and Qwen write arguments, Llama 3 writes parameters."""
_SPACE: Final = " \t\r\n"


class _NotACallError(Exception):
    """The text is not a call."""


class CallScanner:
    """Reads one object that calls one of `names`.

    `is_certain`: the name is one of them, and the arguments are an object or absent. `is_done`: the closing brace was read.
    `is_broken`: the text is not a call.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.is_certain = False
        self._names = names
        self._seen: set[str] = set()
        self._is_text = False
        self.is_done = self.is_broken = False
        self._step: Callable[[str], None] = self._open
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._unsent: list[str] = []

    def feed(self, text: str) -> tuple[int, str]:
        """Returns the number of characters taken, and argument text to send; that is empty until the call is certain.

        Takes fewer than all characters if the object is done or broken; the first character not taken then breaks it.
        """
        taken = 0
        try:
            for letter in text:
                self._step(letter)
                taken += 1
                if self.is_done:
                    break
        except _NotACallError:
            self.is_broken = True
        self.is_certain = self.is_certain or (self.name is not None and (self.is_done or bool(self._unsent)))
        if not self.is_certain:
            return taken, ""
        ready = "".join(self._unsent)
        self._unsent.clear()
        return taken, ready

    def _open(self, letter: str) -> None:
        if letter == "{":
            self._step = self._key_or_end
        elif letter not in _SPACE:
            raise _NotACallError(f"{letter!r} where an object must begin")

    def _key_or_end(self, letter: str) -> None:
        if letter == '"':
            self._value = [letter]
            self._step = self._in_key
        elif letter == "}":
            self._finish()
        elif letter not in _SPACE and letter != ",":
            raise _NotACallError(f"{letter!r} where a key must begin")

    def _in_key(self, letter: str) -> None:
        if self._key_continues(letter):
            return
        self._key = _read_string("".join(self._value))
        self._step = self._colon

    def _colon(self, letter: str) -> None:
        if letter == ":":
            self._value, self._depth = [], 0
            self._step = self._value_start
        elif letter not in _SPACE:
            raise _NotACallError(f"{letter!r} after a key")

    def _value_start(self, letter: str) -> None:
        if letter in _SPACE:
            return
        kind = "arguments" if self._key in ARGUMENT_KEYS else self._key
        if kind in self._seen and kind in ("name", "arguments"):
            raise _NotACallError(f"{kind} is given twice")
        self._seen.add(kind)
        self._is_text = kind == "arguments" and letter != "{"
        if (kind == "name" and letter != '"') or (self._is_text and letter not in '"n') or letter in ",}]:":
            raise _NotACallError(f"{letter!r} where the value of {self._key} must begin")
        self._step = self._in_value
        self._in_string = False
        self._in_value(letter)

    def _in_value(self, letter: str) -> None:
        """Reads one character of a value, or the one after it."""
        if self._in_string:
            self._take(letter)
            self._in_string = self._is_escaped or letter != '"'
            self._is_escaped = letter == "\\" and not self._is_escaped
            if not self._in_string and self._depth == 0:
                self._end_value()
            return
        if self._depth == 0 and self._value and letter in ",}" + _SPACE:
            self._end_value()
            self._step(letter)
            return
        self._take(letter)
        self._in_string = letter == '"'
        self._depth += (letter in "{[") - (letter in "}]")
        if self._depth < 0:
            raise _NotACallError(f"{letter!r} closes nothing")
        if letter in "}]" and self._depth == 0:
            self._end_value()

    def _take(self, letter: str) -> None:
        self._value.append(letter)
        if self._key in ARGUMENT_KEYS and not self._is_text:
            self._unsent.append(letter)

    def _end_value(self) -> None:
        if self._key == "name":
            name = _read_string("".join(self._value))
            if name not in self._names:
                raise _NotACallError(f"no such function: {name}")
            self.name = name
        elif self._is_text:
            self._unsent.append(_read_object("".join(self._value)))
            self._is_text = False
        self._value = []
        self._step = self._key_or_end

    def _finish(self) -> None:
        if self.name is None:
            raise _NotACallError("the object has no name")
        self.is_done = True

    def _key_continues(self, letter: str) -> bool:
        """Adds a character to a key; returns whether the key continues after it."""
        self._value.append(letter)
        ends = letter == '"' and not self._is_escaped
        self._is_escaped = letter == "\\" and not self._is_escaped
        return not ends


def _read_string(text: str) -> str:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise _NotACallError(f"{text} is not a JSON string") from error
    if not isinstance(read, str):
        raise _NotACallError(f"{text} is not a JSON string")
    return read


def _read_object(text: str) -> str:
    """Returns the text of an object that arguments contain as a string; null means an empty object."""
    inner = "{}" if text == "null" else _read_string(text)
    try:
        is_object = isinstance(json.loads(inner), dict)
    except (ValueError, RecursionError) as error:
        raise _NotACallError("the arguments are not JSON") from error
    if not is_object:
        raise _NotACallError("the arguments are not an object")
    return inner
