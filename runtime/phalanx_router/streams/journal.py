"""What the router needs to go on with a stream elsewhere: the request, the tokens delivered so far, and the epoch.

    a token is delivered  iff  its epoch is current  and  its index is next

So whatever groups compute twice, late or out of order, the client gets each index once, in order. A token of the current
epoch that skips an index is a gap: one was lost, and the stream has to be replayed. Pure: no clock, no I/O.
"""

from enum import Enum

import msgspec

from phalanx_api import wire
from phalanx_router.routing.cost import Newcomer


class Verdict(Enum):
    """What becomes of a token: it goes to the client, it is dropped, or it shows that one before it was lost."""

    DELIVER = "deliver"
    DROP = "drop"
    GAP = "gap"


class Journal:
    """The journal of one stream. `epoch` rises by one each time the stream leaves a group that had it."""

    def __init__(self, request: wire.Request) -> None:
        self.epoch = request.epoch
        self.delivered = list(request.delivered)
        self._request = request
        self._fresh = True
        """Whether nothing of this epoch was delivered yet."""
        self._prompt_told = 0
        self.is_alone = request.alone
        """Whether it is to be computed in steps of its own from now on."""

    @property
    def id(self) -> str:
        """The request's."""
        return self._request.id

    @property
    def tenant(self) -> str:
        """Whose the request is."""
        return self._request.tenant

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self._request.prompt)

    @property
    def priority(self) -> int:
        """The request's; lower goes first."""
        return self._request.priority

    @property
    def can_resume(self) -> bool:
        """Whether the client may ask for the stream again."""
        return self._request.can_resume

    @property
    def is_fresh(self) -> bool:
        """Whether no token of the current epoch was delivered."""
        return self._fresh

    def accept(self, epoch: int, index: int, token: int) -> Verdict:
        """What becomes of this token; a delivered one is in the journal from now on."""
        if epoch != self.epoch or index < len(self.delivered):
            return Verdict.DROP
        if index > len(self.delivered):
            return Verdict.GAP
        self.delivered.append(token)
        self._fresh = False
        return Verdict.DELIVER

    def accept_prompt(self, told: wire.PromptDetails) -> list[wire.TokenDetail] | None:
        """The part of these details that is new, each prompt token's once whatever groups tell; None: some before are missing."""
        if told.epoch != self.epoch:
            return []
        known = self._prompt_told + 1 - told.start
        if known < 0:
            return None
        new = told.details[known:]
        self._prompt_told += len(new)
        return new

    def next_epoch(self) -> None:
        """Ends the current epoch: nothing that its group still says is delivered."""
        self.epoch += 1
        self._fresh = True

    def replay(self) -> wire.Request:
        """The request for the group that takes the stream now: it continues after the delivered tokens.

        What was asked stays as it was, so that its client may resume it wherever it is found: a group tells nothing of a prompt
        behind which there are tokens.
        """
        return msgspec.structs.replace(self._request, epoch=self.epoch, delivered=list(self.delivered), alone=self.is_alone)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those delivered."""
        return len(self._request.prompt) + len(self.delivered)

    def newcomer(self) -> Newcomer:
        """The stream as it is to be placed now."""
        request, count = self._request, len(self.delivered)
        target_s = None if request.ttft_target_ms is None else request.ttft_target_ms / 1000
        return Newcomer(len(request.prompt) + count, max(0, request.sampling.max_tokens - count), target_s)

    def end(self) -> wire.FinishReason | None:
        """Why the delivered tokens already end the request, or None: its group may be lost between last token and end.

        The engine's rule, its limit on prompt and output together aside, which a router need not know: a replay beyond
        it is answered with the end.
        """
        sampling = self._request.sampling
        count = len(self.delivered)
        if count and count >= sampling.min_tokens and self.delivered[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if count >= sampling.max_tokens else None
