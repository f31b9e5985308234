"""Why a link ended, and whether that was in order."""

import msgspec
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

PROPER_ENDS = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART})


class LinkBroken(Exception):
    """The link is of no use: what the leader did."""


def is_proper_end(error: Exception) -> bool:
    """Whether the leader closed the link as a server does that stops."""
    return isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code in PROPER_ENDS


def explain(error: Exception) -> str:
    """One sentence on why there is no link."""
    match error:
        case InvalidStatus() if error.response.status_code in (401, 403):
            return f"the leader refused the service token (HTTP {error.response.status_code})"
        case InvalidStatus():
            return f"the leader answered HTTP {error.response.status_code}"
        case ConnectionClosed() if error.rcvd is not None:
            return f"the leader closed the link ({error.rcvd.code} {error.rcvd.reason})".replace(" )", ")")
        case ConnectionClosed():
            return "the connection broke"
        case msgspec.DecodeError():
            return f"the leader sent no frame of the link: {error}"
        case TimeoutError():
            return "the leader did not answer in time"
        case _:
            return str(error) or type(error).__name__
