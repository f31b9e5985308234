"""One client's stream: receives frames of its group and returns deltas for the client.

Waiting tokens are taken together, so a wake-up costs per delta and not per token.
"""

import asyncio
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_router.streams.journal import Journal, TokenVerdict
from phalanx_router.streams.stream_trace import UNTRACED


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The stream's group no longer runs it."""

    why: str
    is_drain: bool = False  # the group drained as planned
    cause: wire.EndCause = ""  # of a failed group, if known


Setback = GroupLost | wire.Refused


class Stream:
    """Implements `links.connection.Sink`. One reader alternates `wait` and `take`."""

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
        self._has_data = False
        self._reader: asyncio.Future[None] | None = None
        self._source: Stream | None = None  # of its tokens, instead of a group
        self._followers: list[Stream] = []
        self.trace = UNTRACED

    @property
    def is_running(self) -> bool:
        """Whether neither an end nor a setback was received."""
        return self._end is None and self._setback is None

    @property
    def has_setback(self) -> bool:
        """Whether a setback was received and not taken."""
        return self._setback is not None

    def follow(self, source: "Stream") -> None:
        """Takes the tokens and the end of `source`, whose tokens start with those of this stream."""
        self._source = source
        source._followers.append(self)
        self.wake()

    def unfollow(self, finish: wire.FinishReason | None = None) -> None:
        """Takes the tokens that the source has, and no later ones. `finish`: why they end the stream, if they do."""
        source, self._source = self._source, None
        if source is None:
            return
        source._followers.remove(self)
        self._copy(source)
        finish = finish or self.journal.finish_reason()
        if self._end is None and finish is not None:
            self._end = wire.Finished(0, self.journal.epoch, finish, self._cached_tokens)
        self.wake()

    def _copy(self, source: "Stream") -> None:
        self.journal.extend(source.journal.delivered[len(self.journal.delivered) :])
        self._cached_tokens = max(self._cached_tokens, source._cached_tokens)
        self._end = self._end or source._end

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Records one token."""
        verdict = self.journal.accept(epoch, index, token)
        if verdict is TokenVerdict.DELIVER:
            if self._has_details:
                self._details.append(detail)
            self.wake()
        elif verdict is TokenVerdict.GAP:
            self.lost(epoch, f"token {len(self.journal.delivered)} is missing before token {index}", cause="outside")

    def prompt_details(self, details: wire.PromptDetails) -> None:
        """Records details of prompt tokens for the next delta."""
        new = self.journal.accept_prompt(details)
        if new is None:
            self.lost(details.epoch, f"details of the prompt before token {details.start} are missing", cause="outside")
        else:
            self._prompt_details += new

    def cached(self, frame: wire.Cached) -> None:
        """Records the number of cached prompt tokens."""
        if frame.epoch == self.journal.epoch:
            self._cached_tokens = max(self._cached_tokens, frame.cached_tokens)
            if frame.prefill is not None:
                self.trace.first_token(frame.epoch, frame.prefill, frame.cached_tokens, len(self.journal.delivered))

    def finished(self, end: wire.Finished) -> None:
        """Records the end of the request."""
        if end.epoch == self.journal.epoch and self._setback is None:
            self._end = end
            self._cached_tokens = max(self._cached_tokens, end.cached_tokens)
            self.wake()

    def refused(self, refused: wire.Refused) -> None:
        """Records a refusal."""
        if refused.epoch == self.journal.epoch:
            self._record_setback(refused)

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        """Records the loss of the group."""
        if epoch == self.journal.epoch:
            self._record_setback(GroupLost(why, is_drain, cause))

    def _record_setback(self, setback: Setback) -> None:
        if self._setback is None and self._end is None:
            self._setback = setback
            self.wake()

    def wake(self) -> None:
        """Wakes the reader, also without new data, and the readers of followers."""
        self._has_data = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        for follower in self._followers:
            follower.wake()

    async def wait(self) -> None:
        """Waits for data or `wake`. A future costs half as much as an Event."""
        if not self._has_data:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_data = False

    def take(self) -> Delta | Setback | None:
        """New tokens, else a setback (once), if any."""
        if self._source is not None:
            self._copy(self._source)
        delivered = self.journal.delivered
        start, self._start = self._start, len(delivered)
        if self._end is not None:
            return self._delta(start, self._end.reason)
        if len(delivered) > start:
            if self._setback is not None:
                self.wake()
            return self._delta(start)
        setback, self._setback = self._setback, None
        return setback

    def _delta(self, start: int, reason: wire.FinishReason | None = None) -> Delta:
        delta = Delta(
            index=start,
            tokens=self.journal.delivered[start:],
            finish=reason,
            cached_tokens=self._cached_tokens,
            details=self._details or (),
            prompt_details=self._prompt_details or (),
            vector=b"" if self._end is None else self._end.vector,
        )
        if self._details or self._prompt_details:
            self._details, self._prompt_details = [], []
        return delta


class AdoptedStream:
    """Sink for the answer to one Adopt, then replaced by `stream`."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[wire.Adopted | wire.Refused | None] = asyncio.get_running_loop().create_future()
        self.stream: Stream | None = None

    def adopted(self, frame: wire.Adopted) -> Stream | None:
        """Sink of the stream, if it runs there and the answer is in time."""
        if self.answer.done():
            return None
        if frame.is_running:
            self.stream = Stream(frame.request)
        self.answer.set_result(frame)
        return self.stream

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Ignored."""

    def prompt_details(self, details: wire.PromptDetails) -> None:
        """Ignored."""

    def cached(self, frame: wire.Cached) -> None:
        """Ignored."""

    def finished(self, end: wire.Finished) -> None:
        """Ignored."""

    def refused(self, refused: wire.Refused) -> None:
        """The leader does not have the stream."""
        if not self.answer.done():
            self.answer.set_result(refused)

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        """The link was lost before the answer."""
        if not self.answer.done():
            self.answer.set_result(None)
