"""One client's stream: receives frames of its group and returns deltas for the client.

A group sends once per step and the client may be slower. Tokens that wait are taken together, so a wake-up costs per delta and
not per token. Tokens that arrived before a setback are delivered before it.
"""

import asyncio
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_router.streams.journal import Journal, TokenVerdict


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The stream's group no longer runs it; the journal has the prompt and the delivered tokens."""

    why: str
    # The group announced that it stops, and drained as planned.
    is_leave: bool = False
    # Why the group failed, if known.
    cause: wire.Cause = ""


Setback = GroupLost | wire.Refused


class Stream:
    """Implements `phalanx_router.links.connection.Sink`. One reader calls `wait`, then `take` until it returns `None`."""

    def __init__(self, request: wire.Request) -> None:
        self.journal = Journal(request)
        self._start = len(self.journal.delivered)
        sampling = request.sampling
        self._has_details = sampling.logprobs is not None or sampling.return_gaps
        self._details: list[wire.TokenDetail | None] = []
        self._prompt_details: list[wire.TokenDetail] = []
        self._cached_tokens = 0
        self._end: wire.Finished | None = None
        self._setback: Setback | None = None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the group still runs it as far as known: neither an end nor an untaken setback."""
        return self._end is None and self._setback is None

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Records one token, with log probabilities if requested."""
        verdict = self.journal.accept(epoch, index, token)
        if verdict is TokenVerdict.DELIVER:
            if self._has_details:
                self._details.append(detail)
            self._wake()
        elif verdict is TokenVerdict.GAP:
            self.lost(epoch, f"token {len(self.journal.delivered)} is missing before token {index}", cause="outside")

    def prompt_details_received(self, details: wire.PromptDetails) -> None:
        """Records log probabilities of prompt tokens. They are sent with the next token, so the reader is not woken."""
        new = self.journal.accept_prompt(details)
        if new is None:
            self.lost(details.epoch, f"details of the prompt before token {details.start} are missing", cause="outside")
        else:
            self._prompt_details += new

    def cached(self, found: wire.Cached) -> None:
        """Records the number of cached prompt tokens; of several groups the maximum counts."""
        if found.epoch == self.journal.epoch:
            self._cached_tokens = max(self._cached_tokens, found.cached_tokens)

    def finished(self, end: wire.Finished) -> None:
        """Records the end of the request."""
        if end.epoch == self.journal.epoch and self._setback is None:
            self._end = end
            self._cached_tokens = max(self._cached_tokens, end.cached_tokens)
            self._wake()

    def refused(self, refused: wire.Refused) -> None:
        """Records that the group rejected the request or stopped it."""
        if refused.epoch == self.journal.epoch:
            self._set_back(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """Records that the group that had the stream in this epoch failed or left."""
        if epoch == self.journal.epoch:
            self._set_back(GroupLost(why, is_leave, cause))

    def _set_back(self, setback: Setback) -> None:
        if self._setback is None and self._end is None:
            self._setback = setback
            self._wake()

    def nudge(self) -> None:
        """Wakes the reader without new data."""
        self._wake()

    def _wake(self) -> None:
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Waits for data since the last `take`, or for `nudge`. A future costs half as much as an asyncio.Event."""
        if not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_news = False

    def take(self) -> Delta | Setback | None:
        """Returns new tokens, else a setback (once), if any."""
        delivered = self.journal.delivered
        start, self._start = self._start, len(delivered)
        if self._end is not None:
            return self._delta(start, self._end.reason)
        if len(delivered) > start:
            if self._setback is not None:
                self._wake()
            return self._delta(start)
        setback, self._setback = self._setback, None
        return setback

    def _delta(self, start: int, reason: wire.FinishReason | None = None) -> Delta:
        """Returns the tokens from index `start`, with the details received since the last delta."""
        delta = Delta(
            index=start,
            tokens=self.journal.delivered[start:],
            finish=reason,
            cached_tokens=self._cached_tokens,
            details=self._details or (),
            prompt_details=self._prompt_details or (),
        )
        if self._details or self._prompt_details:
            self._details, self._prompt_details = [], []
        return delta


# Orphans: streams of lost routers, which their leaders continue until a router adopts them by request id.


class AdoptedStream:
    """Receives the answer to one Adopt, then is replaced by the stream. Implements `phalanx_router.links.connection.Sink`.

    `answer` is the answer: Refused when the leader does not have the stream, `None` when the link was lost before.
    `stream` receives the tokens that follow.
    """

    def __init__(self) -> None:
        self.answer: asyncio.Future[wire.Adopted | wire.Refused | None] = asyncio.get_running_loop().create_future()
        self.stream: Stream | None = None

    def adopted(self, frame: wire.Adopted) -> Stream | None:
        """Returns the sink of the stream, `None` if it does not run there or the answer is too late."""
        if self.answer.done():
            return None
        if frame.runs:
            self.stream = Stream(frame.request)
        self.answer.set_result(frame)
        return self.stream

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Ignored: tokens follow the answer."""

    def prompt_details_received(self, details: wire.PromptDetails) -> None:
        """Ignored: details follow the answer."""

    def cached(self, found: wire.Cached) -> None:
        """Ignored: it follows the answer."""

    def finished(self, end: wire.Finished) -> None:
        """Ignored: the end follows the answer."""

    def refused(self, refused: wire.Refused) -> None:
        """The leader does not have the stream."""
        if not self.answer.done():
            self.answer.set_result(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The link was lost; a leader that has the stream continues it without a router."""
        if not self.answer.done():
            self.answer.set_result(None)
