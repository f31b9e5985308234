"""Scans one JSON tool call, `{"name": ..., "arguments": {...}}`, and streams its arguments.

Object arguments are passed on as the model wrote them; string arguments must contain an object.
"""

import json
from collections.abc import Callable, Container
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
"""Hermes and Qwen write arguments, Llama 3 parameters."""
_SPACE: Final = " \t\r\n"


class _NotACallError(Exception):
    """The text is not a call."""


class CallScanner:
    """Scans one object that calls one of `names`."""

    def __init__(self, names: Container[str]) -> None:
        self.name: str | None = None
        self.is_certain = False  # the name is callable, and the arguments are an object or absent
        self._names = names
        self._keys: set[str] = set()
        self._is_text = False
        self.is_done = self.is_broken = False
        self._step: Callable[[str], None] = self._open
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._unsent: list[str] = []

    def feed(self, text: str) -> tuple[int, str]:
        """Returns the number of characters taken, fewer than all at the end, and argument text once the call is certain."""
        taken = 0
        try:
            for char in text:
                self._step(char)
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

    def _open(self, char: str) -> None:
        if char == "{":
            self._step = self._key_or_end
        elif char not in _SPACE:
            raise _NotACallError(f"{char!r} where an object must begin")

    def _key_or_end(self, char: str) -> None:
        if char == '"':
            self._value = [char]
            self._step = self._in_key
        elif char == "}":
            self._finish()
        elif char not in _SPACE and char != ",":
            raise _NotACallError(f"{char!r} where a key must begin")

    def _in_key(self, char: str) -> None:
        if self._key_continues(char):
            return
        self._key = _read_string("".join(self._value))
        self._step = self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._value, self._depth = [], 0
            self._step = self._value_start
        elif char not in _SPACE:
            raise _NotACallError(f"{char!r} after a key")

    def _value_start(self, char: str) -> None:
        if char in _SPACE:
            return
        kind = "arguments" if self._key in ARGUMENT_KEYS else self._key
        if kind in self._keys and kind in ("name", "arguments"):
            raise _NotACallError(f"{kind} is given twice")
        self._keys.add(kind)
        self._is_text = kind == "arguments" and char != "{"
        if (kind == "name" and char != '"') or (self._is_text and char not in '"n') or char in ",}]:":
            raise _NotACallError(f"{char!r} where the value of {self._key} must begin")
        self._step = self._in_value
        self._in_string = False
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        """Reads a character of a value, or the one after it."""
        if self._in_string:
            self._take(char)
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            if not self._in_string and self._depth == 0:
                self._end_value()
            return
        if self._depth == 0 and self._value and char in ",}" + _SPACE:
            self._end_value()
            self._step(char)
            return
        self._take(char)
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        if self._depth < 0:
            raise _NotACallError(f"{char!r} closes nothing")
        if char in "}]" and self._depth == 0:
            self._end_value()

    def _take(self, char: str) -> None:
        self._value.append(char)
        if self._key in ARGUMENT_KEYS and not self._is_text:
            self._unsent.append(char)

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

    def _key_continues(self, char: str) -> bool:
        """Adds a character; returns whether the key continues."""
        self._value.append(char)
        ends = char == '"' and not self._is_escaped
        self._is_escaped = char == "\\" and not self._is_escaped
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
    """Returns the object in string arguments; null is an empty one."""
    inner = "{}" if text == "null" else _read_string(text)
    try:
        is_object = isinstance(json.loads(inner), dict)
    except (ValueError, RecursionError) as error:
        raise _NotACallError("the arguments are not JSON") from error
    if not is_object:
        raise _NotACallError("the arguments are not an object")
    return inner
