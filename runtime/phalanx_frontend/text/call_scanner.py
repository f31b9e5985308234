"""One call in JSON, `{"name": ..., "arguments": {...}}`, read character by character: its name, then its arguments as they come.

The arguments' text is passed on as it is written, so that nothing is lost by reading and writing JSON again. Keys may come in any
order; other keys are skipped.
"""

import json
from collections.abc import Callable
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
"""Hermes and Qwen say arguments, Llama 3 says parameters."""
_SPACE: Final = " \t\r\n"


class _NotACallError(Exception):
    """The text is no such object."""


class CallScanner:
    """Reads one object. `name` is None until it is known; `is_done` after the closing brace; `is_broken` at what is no call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._step: Callable[[str], None] = self._open
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._untold: list[str] = []

    def feed(self, text: str) -> tuple[int, str]:
        """How many characters were taken, and the arguments' text that may be told now: none before the name is known.

        Fewer than all are taken when the object is done, or broken: then the first one that is not taken breaks it.
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
        if self.name is None:
            return taken, ""
        told = "".join(self._untold)
        self._untold.clear()
        return taken, told

    def _open(self, letter: str) -> None:
        if letter == "{":
            self._step = self._key_or_end
        elif letter not in _SPACE:
            raise _NotACallError(f"{letter!r} where an object was to begin")

    def _key_or_end(self, letter: str) -> None:
        if letter == '"':
            self._value = [letter]
            self._step = self._in_key
        elif letter == "}":
            self._finish()
        elif letter not in _SPACE and letter != ",":
            raise _NotACallError(f"{letter!r} where a key was to begin")

    def _in_key(self, letter: str) -> None:
        if self._string_goes_on(letter):
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
        if self._key == "name" and letter != '"':
            raise _NotACallError("the name is no string")
        if letter in ",}]:":
            raise _NotACallError(f"{letter!r} where a value was to begin")
        self._step = self._in_value
        self._in_string = False
        self._in_value(letter)

    def _in_value(self, letter: str) -> None:
        """One character of a value, or the one after it."""
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
        if self._key in ARGUMENT_KEYS:
            self._untold.append(letter)

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _read_string("".join(self._value))
        self._value = []
        self._step = self._key_or_end

    def _finish(self) -> None:
        if self.name is None:
            raise _NotACallError("the object has no name")
        self.is_done = True

    def _string_goes_on(self, letter: str) -> bool:
        """Adds a character to a key; whether the key goes on after it."""
        self._value.append(letter)
        ends = letter == '"' and not self._is_escaped
        self._is_escaped = letter == "\\" and not self._is_escaped
        return not ends


def _read_string(text: str) -> str:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise _NotACallError(f"{text} is no JSON string") from error
    if not isinstance(read, str):
        raise _NotACallError(f"{text} is no JSON string")
    return read
