"""What the values of flags must be: from their texts to numbers, or an `ArgumentTypeError` that says what is wrong."""

import argparse

from phalanx_api.speculation import MAX_DEPTH, MAX_WIDTH


def natural(text: str) -> int:
    """A whole number from 0. Raises: ArgumentTypeError for anything else."""
    value = int(text) if text.isdecimal() else -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return value


def depth(text: str) -> int:
    """How many tokens may be proposed. Raises: ArgumentTypeError for anything else."""
    value = positive(text)
    if value > MAX_DEPTH:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_DEPTH}")
    return value


def widths(text: str) -> list[int]:
    """How many for each place of a tree. Raises: ArgumentTypeError for anything else."""
    found = [positive(part) for part in text.split(",")]
    if len(found) > MAX_DEPTH or max(found) > MAX_WIDTH:
        raise argparse.ArgumentTypeError(
            f"{text} has more than {MAX_DEPTH} levels, or more than {MAX_WIDTH} tokens for one place"
        )
    return found


def positive(text: str) -> int:
    """A whole number from 1. Raises: ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def milliseconds(text: str) -> float:
    """A time above 0. Raises: ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in milliseconds above 0")
    return value


def port(text: str) -> int:
    """A port; 0 is any. Raises: ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def seconds(text: str) -> float:
    """A time, 0 too. Raises: ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value


def share(text: str) -> float:
    """A share above 0. Raises: ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value
