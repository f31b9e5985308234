"""Event ids of a stream, `<request>:<i0>[,<i1>...]`: a client that lost its connection sends the last one to resume.

There is one index per choice: that of the last token whose text was sent completely up to this event, -1 before the first. The id
is in the event that carries the text, so a client has both or neither.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

STREAM_NAME_SEPARATOR = "~"
"""Separates a client's request id from random bits in a stream name; request ids cannot contain it."""
_EVENT_ID = re.compile(r"(?P<request>[!-~]{1,256}):(?P<indices>(-1|[0-9]{1,9})(,(-1|[0-9]{1,9}))*)")


@dataclass(frozen=True, slots=True)
class EventId:
    """Position of a client in a stream."""

    request: str
    indices: tuple[int, ...]  # per choice: index of the last token that the client has, or -1


def parse_event_id(text: str) -> EventId | None:
    """Parses an event id; returns None if its form is not that of this server."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else EventId(found["request"], tuple(int(index) for index in found["indices"].split(",")))


class EventIds:
    """The event id of one stream as it advances. `nums_whole`: for each choice, the number of tokens sent completely."""

    def __init__(self, request: str, nums_whole: Sequence[int]) -> None:
        self._begin = f"id: {request}:".encode()
        self._indices = [b"%d" % (count - 1) for count in nums_whole]
        self._is_single = len(self._indices) == 1

    def record_sent(self, choice: int, num_whole: int) -> None:
        """Records that the next event completes the text of the choice's first `num_whole` tokens."""
        self._indices[choice] = b"%d" % (num_whole - 1)

    def prepend_to(self, event: bytes) -> bytes:
        """Prepends the current id to the event."""
        indices = self._indices[0] if self._is_single else b",".join(self._indices)
        return b"%b%b\n%b" % (self._begin, indices, event)

    def current(self) -> str:
        """Returns the current id."""
        return (self._begin + b",".join(self._indices)).decode().removeprefix("id: ")


# Random ids and seeds come from the operating system, so that two routers never draw the same.


def draw_id(prefix: str) -> str:
    """Returns a request id with 128 random bits."""
    return prefix + secrets.token_hex(16)


def draw_seed() -> int:
    """Returns a seed of 63 random bits, for a request without `seed`."""
    return secrets.randbits(63)
