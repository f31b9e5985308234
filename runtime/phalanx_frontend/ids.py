"""Event ids of a stream, `<request>:<i0>[,<i1>...]`: per choice the last token with completely sent text, or -1."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

STREAM_NAME_SEPARATOR = "~"
"""Separates a client's request id from random bits in a stream name."""
MAX_CHOICE_DIGITS = 4
"""Of the number of a choice; the random bits of a stream name have more."""
_EVENT_ID = re.compile(r"(?P<request>[!-~]{1,256}):(?P<indices>(-1|[0-9]{1,9})(,(-1|[0-9]{1,9}))*)")


@dataclass(frozen=True, slots=True)
class EventId:
    """Position of a client in a stream."""

    request: str
    indices: tuple[int, ...]  # last token that the client has, per choice, or -1


def parse_event_id(text: str) -> EventId | None:
    """Parses an event id."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else EventId(found["request"], tuple(int(index) for index in found["indices"].split(",")))


class EventIds:
    """The current event id of a stream. `nums_whole`: completely sent tokens per choice."""

    def __init__(self, request: str, nums_whole: Sequence[int]) -> None:
        self._prefix = f"id: {request}:".encode()
        self._indices = [b"%d" % (count - 1) for count in nums_whole]
        self._is_single = len(self._indices) == 1

    def record_sent(self, choice: int, num_whole: int) -> None:
        """Records that the next event completes `num_whole` tokens of a choice."""
        self._indices[choice] = b"%d" % (num_whole - 1)

    def add_to(self, events: bytes) -> bytes:
        """Adds the current id to the last of these events: a client that lacks it has only part of the text."""
        indices = self._indices[0] if self._is_single else b",".join(self._indices)
        before = events.rfind(b"\n\n", 0, -2)
        if before < 0:
            return b"%b%b\n%b" % (self._prefix, indices, events)
        return b"%b%b%b\n%b" % (events[: before + 2], self._prefix, indices, events[before + 2 :])

    def current(self) -> str:
        """Returns the current id."""
        return (self._prefix + b",".join(self._indices)).decode().removeprefix("id: ")


def choice_id(stream: str, number: int, count: int) -> str:
    """Returns the id of the request for a choice of a stream with `count` choices."""
    return stream if count == 1 else f"{stream}-{number}"


def stream_of_choice(id: str) -> str:
    """Returns the name of a stream with several choices from the id of one; empty for the id of an only choice."""
    stream, _, number = id.rpartition("-")
    return stream if number.isdecimal() and len(number) <= MAX_CHOICE_DIGITS else ""


# From the operating system, so that routers never collide.


def random_id(prefix: str) -> str:
    """Returns a request id with 128 random bits."""
    return prefix + secrets.token_hex(16)


def random_seed() -> int:
    """Returns a seed of 63 random bits."""
    return secrets.randbits(63)
