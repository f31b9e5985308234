"""Journal of a stream: the request, the delivered tokens and the epoch, which is all that a replay on another group needs.

    A token is delivered iff its epoch is current and its index is the next.

So the client gets each index once and in order, although groups may compute tokens twice, late or out of order. A token of the
current epoch that skips an index is a gap: a token was lost and the stream must be replayed.
"""

from enum import Enum

import msgspec

from phalanx_api import wire
from phalanx_router.routing.cost import RequestDemand


class TokenVerdict(Enum):
    """What to do with a received token: deliver it, drop it, or replay because of a gap."""

    DELIVER = "deliver"
    DROP = "drop"
    GAP = "gap"


class Journal:
    """Journal of one stream. `epoch` increases by one each time the stream leaves a group."""

    def __init__(self, request: wire.Request) -> None:
        self.epoch = request.epoch
        self.delivered = list(request.delivered)
        self._request = request
        self._fresh = True
        """Whether no token of this epoch was delivered."""
        self._num_prompt_details = 0
        self.is_alone = request.alone
        """Whether the request runs in steps without other requests."""

    @property
    def id(self) -> str:
        """Request id."""
        return self._request.id

    @property
    def tenant(self) -> str:
        """Tenant of the request."""
        return self._request.tenant

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self._request.prompt)

    @property
    def priority(self) -> int:
        """Priority of the request; a lower number is served first."""
        return self._request.priority

    @property
    def can_resume(self) -> bool:
        """Whether the client may resume the stream."""
        return self._request.can_resume

    @property
    def is_fresh(self) -> bool:
        """Whether no token of the current epoch was delivered."""
        return self._fresh

    def accept(self, epoch: int, index: int, token: int) -> TokenVerdict:
        """Returns the verdict on a token and records a delivered one."""
        if epoch != self.epoch or index < len(self.delivered):
            return TokenVerdict.DROP
        if index > len(self.delivered):
            return TokenVerdict.GAP
        self.delivered.append(token)
        self._fresh = False
        return TokenVerdict.DELIVER

    def accept_prompt(self, details: wire.PromptDetails) -> list[wire.TokenDetail] | None:
        """Returns the details not yet delivered, so that each prompt token's are sent once, or `None` if earlier ones are
        missing."""
        if details.epoch != self.epoch:
            return []
        known = self._num_prompt_details + 1 - details.start
        if known < 0:
            return None
        new = details.details[known:]
        self._num_prompt_details += len(new)
        return new

    def next_epoch(self) -> None:
        """Starts the next epoch: frames of the previous one are dropped from now on."""
        self.epoch += 1
        self._fresh = True

    def replay(self) -> wire.Request:
        """Returns the request for the next group: generation continues after the delivered tokens.

        Its options are unchanged, so that a client can resume the stream from any holder: a group sends no details of a prompt
        that is followed by delivered tokens.
        """
        return msgspec.structs.replace(self._request, epoch=self.epoch, delivered=list(self.delivered), alone=self.is_alone)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and delivered tokens."""
        return len(self._request.prompt) + len(self.delivered)

    def demand(self) -> RequestDemand:
        """Returns the stream as a request to be assigned to a group."""
        request, count = self._request, len(self.delivered)
        target_s = None if request.ttft_target_ms is None else request.ttft_target_ms / 1000
        return RequestDemand(len(request.prompt) + count, max(0, request.sampling.max_tokens - count), target_s)

    def end(self) -> wire.FinishReason | None:
        """Returns why the delivered tokens already end the request, else `None`: its group can be lost between last token and
        end.

        Same rule as in the engine, without the limit on prompt and output together, which the router does not know: the engine
        answers a replay beyond that limit with the end.
        """
        sampling = self._request.sampling
        count = len(self.delivered)
        if count and count >= sampling.min_tokens and self.delivered[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if count >= sampling.max_tokens else None
