"""Journal of a stream: all that a replay on another group needs.

    A token is delivered iff its epoch is current and its index is the next.

So the client gets each index once and in order, although groups may compute tokens twice or late. A token of the current epoch
that skips an index requires a replay.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from phalanx_api import wire
from phalanx_router.routing.cost import RequestDemand


class TokenVerdict(Enum):
    """Handling of a received token."""

    DELIVER = "deliver"
    DROP = "drop"
    GAP = "gap"


class Journal:
    """Journal of one stream."""

    def __init__(self, request: wire.Request) -> None:
        self.epoch = request.epoch
        self.delivered = list(request.delivered)
        self.is_alone = request.alone  # in steps without other requests
        self._request = request
        self._is_fresh = True
        self._num_prompt_details = 0

    @property
    def id(self) -> str:
        """Request id."""
        return self._request.id

    @property
    def tenant(self) -> str:
        """Tenant."""
        return self._request.tenant

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self._request.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client wants logprobs of the prompt."""
        return self._request.sampling.prompt_logprobs is not None

    @property
    def priority(self) -> int:
        """Lower numbers are served first."""
        return self._request.priority

    @property
    def can_resume(self) -> bool:
        """Whether the client may resume the stream."""
        return self._request.can_resume

    @property
    def is_pooled(self) -> bool:
        """Whether it ends with a vector: another group computes it from the start, and it is not moved."""
        return self._request.pooling is not None

    @property
    def adapter(self) -> wire.Adapter | None:
        """The adapter that its group must have."""
        return self._request.adapter

    @property
    def is_fresh(self) -> bool:
        """Whether no token of the current epoch was delivered."""
        return self._is_fresh

    def accept(self, epoch: int, index: int, token: int) -> TokenVerdict:
        """Judges a token and records a delivered one."""
        if epoch != self.epoch or index < len(self.delivered):
            return TokenVerdict.DROP
        if index > len(self.delivered):
            return TokenVerdict.GAP
        self.delivered.append(token)
        self._is_fresh = False
        return TokenVerdict.DELIVER

    def extend(self, tokens: Sequence[int]) -> None:
        """Records delivered tokens of an equal stream."""
        if tokens:
            self.delivered += tokens
            self._is_fresh = False

    def accept_prompt(self, details: wire.PromptDetails) -> list[wire.TokenDetail] | None:
        """Details not yet delivered; `None` if earlier ones are missing."""
        if details.epoch != self.epoch:
            return []
        num_known = self._num_prompt_details + 1 - details.start
        if num_known < 0:
            return None
        new = details.details[num_known:]
        self._num_prompt_details += len(new)
        return new

    def next_epoch(self, shared: int = 0) -> None:
        """Starts the next epoch, which drops frames of this one. `shared`: epoch of the equal stream whose tokens it got."""
        self.epoch = max(self.epoch, shared) + 1
        self._is_fresh = True

    def replay(self) -> wire.Request:
        """Request that continues after the delivered tokens, with its original options: a client can resume from any holder."""
        return msgspec.structs.replace(self._request, epoch=self.epoch, delivered=list(self.delivered), alone=self.is_alone)

    def as_shared(self) -> wire.Request:
        """Returns the request without what it has in common with an equal one; see `wire.Share`."""
        return msgspec.structs.replace(self._request.as_shared(), epoch=self.epoch, alone=self.is_alone)

    def attach_pixels(self, request: wire.Request) -> None:
        """Takes the pixels of images from the request of the client that resumes an adopted stream."""
        self._request = self._request.with_pixels_of(request)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and delivered tokens."""
        return len(self._request.prompt) + len(self.delivered)

    def demand(self) -> RequestDemand:
        """Demand on a group."""
        request, count = self._request, len(self.delivered)
        target_s = None if request.ttft_target_ms is None else request.ttft_target_ms / 1000
        return RequestDemand(len(request.prompt) + count, max(0, request.sampling.max_tokens - count), target_s)

    def finish_reason(self) -> wire.FinishReason | None:
        """Why the delivered tokens end the request, if they do: a group can be lost between last token and end.

        The limit on prompt and output together is left to the engine, which answers such a replay with the end. An embedding ends
        with its vector.
        """
        if self.is_pooled:
            return None
        sampling = self._request.sampling
        count = len(self.delivered)
        if count and count >= sampling.min_tokens and self.delivered[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if count >= sampling.max_tokens else None
