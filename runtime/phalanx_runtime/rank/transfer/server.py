"""Where a rank is reached for pages: one TCP port, for ranks of other groups that bring some, and for rank 0's orders.

    any sender   the magic of `page_wire`, then the key of a move           ->  `Intake`
    our rank 0   the magic of orders, then both prove the group's token     ->  orders one way, reports the other

Each connection has a thread of its own. Who has not proved anything yet is a stranger, for at most `HELLO_S`; there are no
more than `MAX_STRANGERS` at once.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_runtime.collective import proof
from phalanx_runtime.collective.connect import listen
from phalanx_runtime.core.migration.page_orders import (
    Expecting,
    ExpectPages,
    ForgetMove,
    Forgotten,
    Order,
    PeerRefused,
    Report,
    SendPages,
    StopPages,
)
from phalanx_runtime.rank.memory.page_memory import DraftPages, Pages, no_draft
from phalanx_runtime.rank.transfer import page_wire as say
from phalanx_runtime.rank.transfer.intake import Intake
from phalanx_runtime.rank.transfer.sender import Sender

log = logging.getLogger(__name__)

ORDERS_MAGIC = b"phxorder"
HELLO_S = 5.0
MAX_STRANGERS = 64
MAX_FRAME_BYTES = 16 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


@dataclass(frozen=True, slots=True)
class Secret:
    """What ranks of one incarnation prove to one another."""

    token: bytes
    incarnation: int

    def proof(self, role: str, rank: int, nonces: bytes) -> bytes:
        """What only a holder of the token can say in this role about these nonces."""
        return proof.proof(self.token, f"pages {role}", self.incarnation, (rank, 0), nonces)


class _Stranger:
    """A connection that has proved nothing yet: cut after `hello_s`, however slowly it speaks; it takes a place till then."""

    def __init__(self, link: socket.socket, hello_s: float, places: threading.BoundedSemaphore) -> None:
        self._link = link
        self._places = places
        self._once = threading.Lock()
        self._timer = threading.Timer(hello_s, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def proved(self) -> None:
        """It is no stranger any more, or is gone. Only the first call counts."""
        if self._once.acquire(blocking=False):
            self._timer.cancel()
            self._places.release()

    def _cut(self) -> None:
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has just left by itself


class KvTransferServer:
    """The port of one rank. `wait_for` returns when the rank has computed a step; `tell` hears reports, on any thread.

    Rank 0 passes `tell`; the reports of other ranks go to whoever proved to be rank 0.
    """

    def __init__(
        self,
        rank: int,
        secret: Secret,
        page_size: int,
        open_pages: Callable[[], Pages],
        wait_for: Callable[[int], None],
        tell: Callable[[Report], None] | None = None,
        hello_s: float = HELLO_S,
        draft: Callable[[], DraftPages | None] = no_draft,
    ) -> None:
        self._rank = rank
        self._hello_s = hello_s
        self._secret = secret
        self._told = tell
        self._intake = Intake(page_size, open_pages, wait_for, self.tell, draft)
        self._sender = Sender(open_pages, wait_for, self.tell, draft)
        self._saying = threading.Lock()
        self._orders: socket.socket | None = None
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._listener = listen(0)
        threading.Thread(target=self._accept, name="pages", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Lets nobody in any more."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # who waits in accept would not notice a close
        except OSError:
            pass
        self._listener.close()

    def obey(self, order: Order) -> None:
        """Does what rank 0 asks. Waits at most until a page that is being written is written."""
        match order:
            case ExpectPages():
                self._intake.expect(order)
                self.tell(Expecting(order.move))
            case ForgetMove(move):
                self._intake.forget(move)
                self.tell(Forgotten(move))
            case SendPages():
                self._sender.send(order)
            case StopPages(move):
                self._sender.stop(move)

    def tell(self, report: Report) -> None:
        """Reports to rank 0. Without it this rank is about to leave."""
        if self._told is not None:
            self._told(report)
            return
        with self._saying:
            if self._orders is not None:
                try:
                    send_frame(self._orders, _encode(report))
                except OSError:
                    self._orders = None

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(link,), name="pages-in", daemon=True).start()
            else:
                link.close()
                self.tell(PeerRefused("too many at once"))

    def _greet(self, link: socket.socket) -> None:
        stranger = _Stranger(link, self._hello_s, self._strangers)
        try:
            with link:
                link.settimeout(self._hello_s)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                why = self._serve(link, say.read_exactly(link, len(say.MAGIC)), stranger.proved)
        except OSError:
            why = "silent"
        except Exception:
            log.exception("a connection for pages ended by a bug")
            why = "error"
        finally:
            stranger.proved()
        if why is not None:
            self.tell(PeerRefused(why))

    def _serve(self, link: socket.socket, magic: bytes, proved: Callable[[], None]) -> str | None:
        """Serves one connection to its end; why it was turned away, if it was. Raises OSError."""
        if magic == say.MAGIC:
            return self._intake.serve(link, proved)
        if magic != ORDERS_MAGIC:
            return "malformed"
        theirs, mine = say.read_exactly(link, proof.NONCE_BYTES), proof.make_nonce()
        link.sendall(mine + self._secret.proof("listen", self._rank, theirs + mine))
        if not proof.is_equal_proof(
            say.read_exactly(link, proof.PROOF_BYTES), self._secret.proof("dial", self._rank, theirs + mine)
        ):
            return "token"
        proved()
        link.settimeout(None)
        with self._saying:
            self._orders = link
        self._obey_all(link)
        return None

    def _obey_all(self, link: socket.socket) -> None:
        """Obeys until rank 0 is gone, which ends this process soon for other reasons."""
        while True:
            try:
                frame = read_frame(link)
            except OSError:
                return
            self.obey(_decode_order(frame))


def dial(host: str, port: int, rank: int, secret: Secret) -> socket.socket:
    """A proven connection of rank 0 to another rank of its group. Raises OSError."""
    link = socket.create_connection((host, port), HELLO_S)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = proof.make_nonce()
        link.sendall(ORDERS_MAGIC + mine)
        answer = say.read_exactly(link, proof.NONCE_BYTES + proof.PROOF_BYTES)
        nonces = mine + answer[: proof.NONCE_BYTES]
        if not proof.is_equal_proof(answer[proof.NONCE_BYTES :], secret.proof("listen", rank, nonces)):
            raise ConnectionRefusedError(f"whoever answers for rank {rank} did not prove the token")
        link.sendall(secret.proof("dial", rank, nonces))
        link.settimeout(None)
    except BaseException:
        link.close()
        raise
    return link


def send_order(link: socket.socket, order: Order) -> None:
    """Sends one order. Raises OSError."""
    send_frame(link, _encode(order))


def read_report(link: socket.socket) -> Report:
    """The next report. Raises OSError."""
    report: Report = _decode_report(read_frame(link))
    return report


def send_frame(link: socket.socket, body: bytes) -> None:
    """Sends bytes behind their length. Raises OSError."""
    link.sendall(len(body).to_bytes(4, "little") + body)


def read_frame(link: socket.socket) -> bytes:
    """The next bytes behind their length. Raises OSError."""
    size = int.from_bytes(say.read_exactly(link, 4), "little")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES} are expected")
    return say.read_exactly(link, size)
