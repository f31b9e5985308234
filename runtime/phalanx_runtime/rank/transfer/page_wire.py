"""Wire protocol of a page transfer. Functions raise OSError if the connection fails.

    sender: hello (move, key)                              receiver: ACK, 1 if its pages have a draft; or it closes
    sender: DRAFT (page bytes, name), after ACK 1 only     ACK, 1 if it has the same draft: pages then include its layers
    sender: PAGE (position, checksum, bytes), repeated     if pages have parts, PART (the same) after those that are read
    sender: STATE (tokens, checksum, bytes)                before LAST, if layers keep a state per request
    sender: ROUND                                          ACK once all pages so far are verified and written
    sender: LAST (tokens, drafted tokens, digest)          ACK once every position is present; both close

The answer to invalid data is ERROR with a code. If TLS rejects a record, the connection ends without an
answer: only the receiver reports `checksum`. Numbers are little-endian.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx_runtime.collective.secure import PeerSocket, SecureSocket

MAGIC = b"phxpage1"
KEY_BYTES = 32
MAX_MOVE_BYTES = 256
DIGEST_BYTES = 32
PAGE, ROUND, LAST, DRAFT, PART, STATE = 1, 2, 3, 4, 5, 6
ACK, ERROR = 1, 2
CODES = ("checksum", "incompatible", "no_room", "malformed", "lease")
"""By number on the wire."""
_HELLO = struct.Struct("<IH32s")
_HEADER = struct.Struct("<BIII")
_ANSWER = struct.Struct("<BB")


class TransferError(Exception):
    """Invalid transfer. `code` is in `CODES`."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class PageHello:
    """The sender's introduction."""

    move: str
    key: bytes
    page_bytes: int
    """Bytes per page of the sender."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Header of a sender's frame."""

    kind: int
    position: int
    """PAGE, PART: page. LAST: tokens in all pages. STATE: tokens that it includes."""
    length: int
    """Bytes that follow. DRAFT: bytes per page with the draft's layers."""
    checksum: int
    """PAGE, PART, STATE: see `checksum`. LAST: tokens computed by the draft."""


def send_hello(connection: PeerSocket, hello: PageHello) -> None:
    """Sends magic and hello."""
    move = hello.move.encode()
    connection.sendall(MAGIC + _HELLO.pack(hello.page_bytes, len(move), hello.key) + move)


def read_hello(connection: PeerSocket) -> PageHello:
    """Reads the hello after the magic. Raises TransferError."""
    page_bytes, length, key = _HELLO.unpack(read_exactly(connection, _HELLO.size))
    if length > MAX_MOVE_BYTES:
        raise TransferError("malformed", f"the name of the move has {length} bytes; at most {MAX_MOVE_BYTES} are allowed")
    try:
        return PageHello(read_exactly(connection, length).decode(), key, page_bytes)
    except UnicodeDecodeError as error:
        raise TransferError("malformed", "the name of the move is not UTF-8") from error


def send_page(connection: PeerSocket, position: int, data: Sequence[memoryview], kind: int = PAGE) -> None:
    """Sends a page, its PART, or a STATE; with a checksum unless over TLS."""
    size = sum(len(piece) for piece in data)
    send_pieces(connection, [memoryview(_HEADER.pack(kind, position, size, checksum(connection, data))), *data])


def send_round(connection: PeerSocket) -> None:
    """Requests an ACK."""
    connection.sendall(_HEADER.pack(ROUND, 0, 0, 0))


def send_last(connection: PeerSocket, num_computed: int, digest: bytes, num_drafted: int = 0) -> None:
    """Ends the pages. `num_drafted`: leading tokens computed by the draft."""
    connection.sendall(_HEADER.pack(LAST, num_computed, DIGEST_BYTES, num_drafted) + digest)


def send_draft(connection: PeerSocket, page_bytes: int, name: bytes) -> None:
    """Asks whether the receiver has the same draft."""
    connection.sendall(_HEADER.pack(DRAFT, 0, page_bytes, 0) + _draft_digest(name))


def is_draft(draft_digest: bytes, name: bytes) -> bool:
    """Returns whether the digest is of the draft `name`."""
    return draft_digest == _draft_digest(name)


def _draft_digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def read_header(connection: PeerSocket) -> FrameHeader:
    """Reads the next header."""
    return FrameHeader(*_HEADER.unpack(read_exactly(connection, _HEADER.size)))


def send_ack(connection: PeerSocket, number: int = 0) -> None:
    """Sends an ACK."""
    connection.sendall(_ANSWER.pack(ACK, number))


def send_error(connection: PeerSocket, code: str) -> None:
    """Ends the transfer."""
    connection.sendall(_ANSWER.pack(ERROR, CODES.index(code)))


def read_ack(connection: PeerSocket) -> int:
    """Returns the number of an ACK. Raises TransferError."""
    kind, number = _ANSWER.unpack(read_exactly(connection, _ANSWER.size))
    if kind != ACK:
        code = CODES[number] if number < len(CODES) else "malformed"
        raise TransferError(code, f"the target ended the transfer: {code}")
    return int(number)


def has_checksums(connection: PeerSocket) -> bool:
    """Returns whether pages have checksums. TLS authenticates every byte that it returns, so receivers do not look at them."""
    return not isinstance(connection, SecureSocket)


def checksum(connection: PeerSocket, data: Iterable[memoryview]) -> int:
    """CRC-32 of all pieces; 0 without checksums."""
    value = 0
    if not has_checksums(connection):
        return value
    for piece in data:
        value = zlib.crc32(piece, value)
    return value


def digest(data: Iterable[memoryview]) -> bytes:
    """BLAKE2b of all pieces."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in data:
        hasher.update(piece)
    return hasher.digest()


def send_pieces(connection: PeerSocket, pieces: Sequence[memoryview]) -> None:
    """Sends pieces without joining them."""
    remaining = list(pieces)
    while remaining:
        sent = connection.sendmsg(remaining[:512])
        while remaining and sent >= len(remaining[0]):
            sent -= len(remaining.pop(0))
        if sent:
            remaining[0] = remaining[0][sent:]


def read_exactly(connection: PeerSocket, size: int) -> bytes:
    """Reads `size` bytes."""
    buffer = bytearray(size)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(connection: PeerSocket, view: memoryview) -> None:
    """Fills the view. Raises ConnectionResetError."""
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        view = view[count:]
