"""What goes over a connection between a rank that sends pages and one that takes them.

    sender: Hello, move, key                          taker: ACK, 1 when its pages hold a draft; or it closes without a word
    sender: DRAFT bytes, name   (after ACK 1 only)    ACK, 1 when it is the taker's draft: then pages come with its layers
    sender: PAGE position, checksum, bytes   ...      nothing
    sender: ROUND                                     ACK when all pages so far are checked and written
    sender: LAST tokens, drafted ones, digest of the last page        ACK when every position is there; both close

A page that fails its checksum, a length or position out of bounds, anything else that does not belong here: BAD with a code, and
the connection is closed. Numbers are little-endian.
"""

import hashlib
import socket
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAGIC = b"phxpage1"
KEY_BYTES = 32
MAX_MOVE_BYTES = 256
DIGEST_BYTES = 32
PAGE, ROUND, LAST, DRAFT = 1, 2, 3, 4
ACK, BAD = 1, 2
CODES = ("checksum", "incompatible", "no_room", "malformed", "lease")
"""Why a taker gives up, by the number that is sent."""
_HELLO = struct.Struct("<IH32s")
_HEAD = struct.Struct("<BIII")
_ANSWER = struct.Struct("<BB")


class BadTransfer(Exception):
    """What came does not belong here. `code` is one of `CODES`."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class PageHello:
    """Who comes: the move, its key, and how many bytes a page has there."""

    move: str
    key: bytes
    page_bytes: int


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What follows: PAGE with its position, length and checksum; ROUND; LAST with the tokens that all pages hold, and as checksum
    how many of them a draft has computed; DRAFT with the bytes of a page that holds the layers of a draft too."""

    kind: int
    position: int
    length: int
    checksum: int


def send_hello(link: socket.socket, hello: PageHello) -> None:
    """Introduces the sender. Raises OSError."""
    move = hello.move.encode()
    link.sendall(MAGIC + _HELLO.pack(hello.page_bytes, len(move), hello.key) + move)


def read_hello(link: socket.socket) -> PageHello:
    """Who comes, after the magic was read. Raises OSError, BadTransfer."""
    page_bytes, length, key = _HELLO.unpack(read_exactly(link, _HELLO.size))
    if length > MAX_MOVE_BYTES:
        raise BadTransfer("malformed", "not the beginning of a transfer")
    try:
        return PageHello(read_exactly(link, length).decode(), key, page_bytes)
    except UnicodeDecodeError as error:
        raise BadTransfer("malformed", "the name of the move is no text") from error


def send_page(link: socket.socket, position: int, parts: Sequence[memoryview]) -> None:
    """Sends a page with its checksum. Raises OSError."""
    size = sum(len(part) for part in parts)
    send_parts(link, [memoryview(_HEAD.pack(PAGE, position, size, checksum(parts))), *parts])


def send_round(link: socket.socket) -> None:
    """Asks whether all pages so far came well."""
    link.sendall(_HEAD.pack(ROUND, 0, 0, 0))


def send_last(link: socket.socket, num_computed: int, digest: bytes, num_drafted: int = 0) -> None:
    """Says that no page follows, how many tokens all of them hold, and of how many of these they hold what a draft computed."""
    link.sendall(_HEAD.pack(LAST, num_computed, DIGEST_BYTES, num_drafted) + digest)


def send_draft(link: socket.socket, page_bytes: int, name: bytes) -> None:
    """Asks whether the taker has the same draft."""
    link.sendall(_HEAD.pack(DRAFT, 0, page_bytes, 0) + hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest())


def is_draft(told: bytes, name: bytes) -> bool:
    """Whether this is what a sender tells of the draft of this name."""
    return told == hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def read_head(link: socket.socket) -> FrameHeader:
    """What follows. Raises OSError; ConnectionError when the sender left."""
    return FrameHeader(*_HEAD.unpack(read_exactly(link, _HEAD.size)))


def send_answer(link: socket.socket, code: str | None = None, number: int = 0) -> None:
    """ACK with a number, or why the transfer is over."""
    link.sendall(_ANSWER.pack(ACK, number) if code is None else _ANSWER.pack(BAD, CODES.index(code)))


def read_answer(link: socket.socket) -> int:
    """The number at ACK. Raises BadTransfer with the taker's reason, OSError."""
    kind, number = _ANSWER.unpack(read_exactly(link, _ANSWER.size))
    if kind != ACK:
        code = CODES[number] if number < len(CODES) else "malformed"
        raise BadTransfer(code, f"the target gave up: {code}")
    return int(number)


def checksum(parts: Iterable[memoryview]) -> int:
    """CRC-32 over all parts."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def digest(parts: Iterable[memoryview]) -> bytes:
    """BLAKE2b over all parts."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def send_parts(link: socket.socket, parts: Sequence[memoryview]) -> None:
    """Sends all parts without joining them. Raises OSError."""
    left = list(parts)
    while left:
        sent = link.sendmsg(left[:512])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def read_exactly(link: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError; ConnectionError when the other side closed before."""
    buffer = bytearray(size)
    read_into(link, memoryview(buffer))
    return bytes(buffer)


def read_into(link: socket.socket, view: memoryview) -> None:
    """Fills the view. Raises OSError; ConnectionError when the other side closed before."""
    while len(view):
        got = link.recv_into(view)
        if not got:
            raise ConnectionResetError("the other side closed the connection")
        view = view[got:]
