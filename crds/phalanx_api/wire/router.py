"""Frames of the link that a router sends; some of them go on to the engine as they are. Moves: `phalanx_api.moves`."""

import msgspec

from phalanx_api.wire.request import Request


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First frame of a router. `instance` is drawn anew each time it starts.

    It speaks the versions from `oldest_version` (0: no other) to `protocol_version`: see `versions.LINK`.
    """

    protocol_version: int
    router: str
    instance: str = ""
    oldest_version: int = 0


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start this request under this handle; with `move`, on the pages that came with that move."""

    handle: int
    request: Request
    move: str = ""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """To the target of a move (`phalanx_api.moves`): reserve pages for this request for `lease_s`, say what you hold of it."""

    move: str
    request: Request
    lease_s: float = 10.0


class Adopt(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Give me, under this handle, this tenant's stream of this id, whose router was lost. Answers: Adopted, Refused with 404."""

    handle: int
    request_id: str
    tenant: str = ""


class Disown(msgspec.Struct, frozen=True, array_like=True, tag="disown"):
    """Let these requests go on without me; who asks for their streams soon adopts them. Unknown handles are no error."""

    handles: list[int]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Forget these requests. Unknown handles are no error: the request may just have ended."""

    handles: list[int]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the `Assets` of this hash."""

    assets_hash: str


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Send a snapshot of the page keys, then changes from there on."""
