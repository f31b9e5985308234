"""The seam between the door and what generates: token ids and sampling parameters in, indexed tokens out.

The runtime implements it over its local engine, the router over the fleet of groups.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx_api import wire


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that follow those delivered before: the first has output index `index`. The last delta carries `finish`.

    `details` is parallel to `tokens` when logprobs were asked for, else empty. `prompt_details` are those of prompt tokens, in
    order from token 1 on over all deltas of the request; none after its first token. `cached_tokens` of the prompt
    were found in a prefix cache: every delta with tokens says it.
    """

    index: int
    tokens: list[int]
    finish: wire.FinishReason | None = None
    cached_tokens: int = 0
    details: Sequence[wire.TokenDetail | None] = ()
    prompt_details: Sequence[wire.TokenDetail] = ()


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Nothing new, but the request lives: the door may send a comment so that proxies keep the connection."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A stream that began before: its request with all tokens that are known of it, and why it ended, if it did."""

    request: wire.Request
    finish: wire.FinishReason | None = None


class BackendError(Exception):
    """The request has no (further) answer. `status` is the HTTP status if nothing was sent yet, `code` the reason in one word.

    `can_resume`: the stream only stops here; its client may ask another door for the rest.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None, can_resume: bool = False
    ) -> None:
        super().__init__(message)
        self.can_resume = can_resume
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """What a door stands before."""

    def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Deltas in order of index, each index once, ending with one that has `finish`.

        Closing the iterator early aborts the request. Raises BackendError.
        """
        ...

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, Begun]:
        """Those of these streams of this tenant that may be resumed, by id: whoever had them has them no more, and `generate`
        goes on with such a request where it stands. Those of other tenants notice nothing."""
        ...

    async def awake(self) -> None:
        """Returns when `assets` are known, or when it is of no use to wait for them. Raises BackendError."""
        ...

    def assets(self) -> wire.Assets:
        """What the door needs of the model. Raises BackendError 503 while nothing has told it yet."""
        ...

    def not_ready(self) -> str | None:
        """Why no request can be served now, or None when it can. Feeds /readyz."""
        ...
