"""Ids of the events of a stream, `<request>:<i0>[,<i1>...]`, by which a client that lost its connection asks for the rest.

One index for each choice: that of the last token whose text was wholly sent up to this event, -1 before the first. The id stands
in the event that brings the text, so that a client has both or neither.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

NAME_END = "~"
"""Between an id that a client chose and the random bits that make it a stream's name: no request id holds it."""
_EVENT_ID = re.compile(r"(?P<request>[!-~]{1,256}):(?P<indices>(-1|[0-9]{1,9})(,(-1|[0-9]{1,9}))*)")


@dataclass(frozen=True, slots=True)
class EventId:
    """Up to where a client has a stream: for each choice the index of the last token that it has, or -1."""

    request: str
    indices: tuple[int, ...]


def read_event_id(text: str) -> EventId | None:
    """What an id says, or None when it is none of ours."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else EventId(found["request"], tuple(int(index) for index in found["indices"].split(",")))


class EventIds:
    """The ids of one stream as they grow. `nums_whole`: for each choice, how many tokens were wholly sent so far."""

    def __init__(self, request: str, nums_whole: Sequence[int]) -> None:
        self._begin = f"id: {request}:".encode()
        self._indices = [b"%d" % (count - 1) for count in nums_whole]
        self._is_single = len(self._indices) == 1

    def sent(self, choice: int, num_whole: int) -> None:
        """Notes that the event in the making brings the text of the choice's first tokens to an end."""
        self._indices[choice] = b"%d" % (num_whole - 1)

    def mark(self, event: bytes) -> bytes:
        """The event with the id of now."""
        indices = self._indices[0] if self._is_single else b",".join(self._indices)
        return b"%b%b\n%b" % (self._begin, indices, event)

    def now(self) -> str:
        """The id of now, to be told."""
        return (self._begin + b",".join(self._indices)).decode().removeprefix("id: ")


# Random names and seeds, from the system's own source: two routers never draw the same.


def draw_id(prefix: str) -> str:
    """A request id with 128 random bits."""
    return prefix + secrets.token_hex(16)


def draw_seed() -> int:
    """A seed of 63 random bits, for a request that brings none."""
    return secrets.randbits(63)
