"""Changes of this router's journals that its peer has not got yet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import JournalChanges, JournalCopy, JournalEnd, JournalHistory, SharedResponse
from phalanx_router.resume.registry import history, make_copy
from phalanx_router.session import StreamSession

MAX_OPENED = 64
"""New journals per frame: a new peer gets many at once."""
MAX_OPENED_BYTES = 16 << 20
"""After which a frame takes no further copy: a peer closes the connection at a frame above 256 MiB."""


@dataclass(slots=True)
class _SentJournal:
    number: int
    num_tokens: int = -1  # -1: nothing was sent
    weights: str | None = None  # in the copy
    history: JournalHistory | None = None


class PeerBacklog:
    """Journal changes for a peer; at first all open journals."""

    def __init__(self, open_sessions: Iterable[StreamSession]) -> None:
        self._new = dict.fromkeys(open_sessions)
        self._sent: dict[StreamSession, _SentJournal] = {}
        self._extended = dict[StreamSession, None]()
        self._closed: list[JournalEnd] = []
        self._opened: list[tuple[int, JournalCopy]] = []
        self._tokens: list[tuple[int, Sequence[int]]] = []  # by number
        self._replayed: dict[int, JournalHistory] = {}  # by number
        self._last_number = 0

    def opened(self, session: StreamSession) -> None:
        """Records a new stream."""
        self._new[session] = None

    def extended(self, session: StreamSession) -> None:
        """Records new tokens, or the loss of a group."""
        self._extended[session] = None

    def closed(self, session: StreamSession, finish: wire.FinishReason | None, is_forgotten: bool) -> None:
        """Records the end of a stream, if it was sent."""
        self._new.pop(session, None)
        self._extended.pop(session, None)
        if (sent := self._sent.pop(session, None)) is not None:
            self._add(session, sent)
            self._closed.append(JournalEnd(sent.number, finish, is_forgotten))

    def _add(self, session: StreamSession, sent: _SentJournal) -> None:
        """Adds the tokens and the history that were not sent, or the whole copy: at first, and again with the weights.

        A group that dies has many streams, whose prompts would hold up both routers.
        """
        delivered, weights, latest = session.stream.journal.delivered, session.computing.model_hash, history(session)
        if sent.num_tokens >= 0 and sent.weights == weights:
            if sent.history != latest:
                self._replayed[sent.number] = latest
            self._tokens.append((sent.number, delivered[sent.num_tokens :]))
        else:
            self._tokens = [tail for tail in self._tokens if tail[0] != sent.number]  # the copy has them
            self._replayed.pop(sent.number, None)
            self._opened.append((sent.number, make_copy(session)))
        sent.num_tokens, sent.weights, sent.history = len(delivered), weights, latest

    def take(self, responses: Sequence[SharedResponse] = ()) -> JournalChanges | None:
        """Next frame with `responses`, if there are any or a journal changed."""
        extended, self._extended = self._extended, {}
        for session in extended:
            if (sent := self._sent.get(session)) is not None:
                self._add(session, sent)
        for session in [] if self._opened else list(self._new)[:MAX_OPENED]:
            del self._new[session]
            self._last_number += 1
            self._sent[session] = _SentJournal(self._last_number)
            self._add(session, self._sent[session])
        opened, tails, closed = self._take_opened(), list[tuple[int, Sequence[int]]](), list[JournalEnd]()
        replayed: dict[int, JournalHistory] = {}
        if not self._opened:  # else some numbers would precede their copies
            tails, closed = self._tokens, self._closed
            self._tokens, self._closed = [], []
            replayed, self._replayed = self._replayed, {}
        if not (opened or tails or closed or responses or replayed):
            return None
        return JournalChanges(
            opened=opened,
            numbers=[number for number, _ in tails],
            counts=[len(tail) for _, tail in tails],
            tokens=[token for _, tail in tails for token in tail],
            closed=closed,
            responses=list(responses),
            replayed=list(replayed.items()),
        )

    def _take_opened(self) -> list[tuple[int, JournalCopy]]:
        """Removes and returns the copies of one frame."""
        count = num_bytes = 0
        while count < len(self._opened) and num_bytes < MAX_OPENED_BYTES:
            num_bytes += len(peer_wire.encode(self._opened[count][1]))
            count += 1
        opened, self._opened = self._opened[:count], self._opened[count:]
        return opened
