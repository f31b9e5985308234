"""Types of flags. Each parses a text or raises `ArgumentTypeError`."""

import argparse
from collections.abc import Callable
from typing import Any


def flag_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns `parse` with ValueError converted to ArgumentTypeError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def natural(text: str) -> int:
    """Parses a whole number of at least 0. Raises ArgumentTypeError."""
    value = int(text) if text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return value


def positive(text: str) -> int:
    """Parses a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """Parses a port; 0: any free port. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def seconds(text: str) -> float:
    """Parses a duration of at least 0. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 <= value < float("inf"), "a time in seconds")


def share(text: str) -> float:
    """Parses a fraction in (0, 1]. Raises ArgumentTypeError."""
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and at most 1")


def _number(text: str, is_valid: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
