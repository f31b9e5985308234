"""The handshake with a leader: which version of the link is spoken, or why none is.

A leader of the release before this one knows a single version, and closes a link whose Hello names another. So after such a
refusal the next connection offers our oldest version, and the one after that our newest again.
"""

from websockets.exceptions import ConnectionClosed

from phalanx_api import wire
from phalanx_api.wire.versions import CLOSE_WRONG_VERSION, LINK
from phalanx_router.link_end import LinkBroken, explain
from phalanx_router.links.connection import Connection


class Greeter:
    """Says Hello to one leader, connection after connection."""

    def __init__(self, router: str, instance: str) -> None:
        self.unknown = ""
        """Why this leader and this router share no version; empty while they do, or nobody knows yet."""
        self._router = router
        self._instance = instance
        self._offered = LINK.newest

    async def greet(self, connection: Connection) -> wire.Welcome:
        """The leader's first frame. Raises LinkBroken, ConnectionClosed, msgspec.DecodeError."""
        await connection.send(wire.encode(wire.Hello(self._offered, self._router, self._instance, LINK.oldest)))
        try:
            welcome = wire.decode_from_leader(await connection.recv(decode=False))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == CLOSE_WRONG_VERSION:
                raise LinkBroken(self._refused(explain(error))) from error
            raise
        if not isinstance(welcome, wire.Welcome):
            raise LinkBroken(f"the leader said {type(welcome).__name__} before Welcome")
        if welcome.protocol_version > self._offered or welcome.protocol_version not in LINK:
            self.unknown = f"the leader speaks link version {welcome.protocol_version}, this router {LINK}"
            raise LinkBroken(self.unknown)
        self.unknown = ""
        return welcome

    def _refused(self, why: str) -> str:
        """What to say of a leader that refused the version that was offered; the next connection offers another."""
        if self._offered == LINK.oldest and not self.unknown:
            self.unknown = f"{why}; this router speaks {LINK}"
        self._offered = LINK.oldest if self._offered == LINK.newest else LINK.newest
        return self.unknown or why
