"""One client's stream: takes what its group says, and gives what the client may have next.

A group speaks once per step; the client's side may be slower. Tokens that wait together are taken together, so the cost
of a wake-up is per delta, not per token. Tokens that arrived before a setback are given before it.
"""

import asyncio
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_router.streams.journal import Journal, Verdict


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream's group no longer works on it; prompt and delivered tokens are in the journal.

    `is_leave`: the group had said that it would stop, and stopped in order. `cause`: of its end, as far as is known.
    """

    why: str
    is_leave: bool = False
    cause: wire.Cause = ""


Setback = Lost | wire.Refused


class Stream:
    """Implements `phalanx_router.links.connection.Sink`. One reader: `wait`, then `take` until it gives None."""

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
    def goes_on(self) -> bool:
        """Whether its group still works on it, as far as is known: no end came, and no setback that was not taken."""
        return self._end is None and self._setback is None

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """One token of the stream's group, with what was asked about it."""
        verdict = self.journal.accept(epoch, index, token)
        if verdict is Verdict.DELIVER:
            if self._has_details:
                self._details.append(detail)
            self._wake()
        elif verdict is Verdict.GAP:
            self.lost(epoch, f"token {len(self.journal.delivered)} never came, {index} did", cause="outside")

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """What was asked about tokens of the prompt: they leave with the next token, so nobody wakes for them."""
        new = self.journal.accept_prompt(told)
        if new is None:
            self.lost(told.epoch, f"details of the prompt before token {told.start} never came", cause="outside")
        else:
            self._prompt_details += new

    def cached(self, found: wire.Cached) -> None:
        """What was found of the prompt in the group's prefix cache. Of several groups the one that found most counts."""
        if found.epoch == self.journal.epoch:
            self._cached_tokens = max(self._cached_tokens, found.cached_tokens)

    def finished(self, end: wire.Finished) -> None:
        """The request ended by itself."""
        if end.epoch == self.journal.epoch and self._setback is None:
            self._end = end
            self._cached_tokens = max(self._cached_tokens, end.cached_tokens)
            self._wake()

    def refused(self, refused: wire.Refused) -> None:
        """The group does not run the request, or no longer."""
        if refused.epoch == self.journal.epoch:
            self._set_back(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group that had the stream in this epoch is gone, or left in order."""
        if epoch == self.journal.epoch:
            self._set_back(Lost(why, is_leave, cause))

    def _set_back(self, setback: Setback) -> None:
        if self._setback is None and self._end is None:
            self._setback = setback
            self._wake()

    def nudge(self) -> None:
        """Wakes the reader though nothing came."""
        self._wake()

    def _wake(self) -> None:
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Returns when something came since the last `take`, or after `nudge`. A bare future: half the price of an Event."""
        if not self._has_news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._has_news = False

    def take(self) -> Delta | Setback | None:
        """What comes next: tokens that were not taken yet, else a setback (once), else None."""
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
        """All tokens from this index on, with what was told of them and of the prompt since the last delta."""
        delta = Delta(
            start, self.journal.delivered[start:], reason, self._cached_tokens, self._details or (), self._prompt_details or ()
        )
        if self._details or self._prompt_details:
            self._details, self._prompt_details = [], []
        return delta


# Streams of lost routers, at the leaders where they go on: asked for by id, adopted where they stand.


class Adopting:
    """Waits for a leader's answer to one Adopt, then gives way to the stream. Implements `phalanx_router.links.connection.Sink`.

    `told` is what the leader said: Refused when it knows no such stream, None when it was lost before it said anything.
    `stream` takes the tokens that follow.
    """

    def __init__(self) -> None:
        self.told: asyncio.Future[wire.Adopted | wire.Refused | None] = asyncio.get_running_loop().create_future()
        self.stream: Stream | None = None

    def adopted(self, frame: wire.Adopted) -> Stream | None:
        """Who hears of the stream from now on; nobody when it does not run there."""
        if self.told.done():
            return None
        if frame.runs:
            self.stream = Stream(frame.request)
        self.told.set_result(frame)
        return self.stream

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Not before the answer."""

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """Not before the answer."""

    def cached(self, found: wire.Cached) -> None:
        """Not before the answer."""

    def finished(self, end: wire.Finished) -> None:
        """Not before the answer."""

    def refused(self, refused: wire.Refused) -> None:
        """There is no such stream."""
        if not self.told.done():
            self.told.set_result(refused)

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The leader is gone; if it has the stream, it goes on there without a router."""
        if not self.told.done():
            self.told.set_result(None)
