"""Interface to what generates tokens and computes embeddings: the engine of a runtime, or the groups behind a router."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import wire


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens that follow the delivered ones. A Struct, because one is made per event of every stream."""

    index: int  # output index of the first token
    tokens: list[int]
    finish: wire.FinishReason | None = None
    cached_tokens: int = 0  # found in a prefix cache; set in every delta with tokens
    details: Sequence[wire.TokenDetail | None] = ()  # parallel to `tokens`, or empty
    prompt_details: Sequence[wire.TokenDetail] = ()  # prompt logprobs from token 1 on, before the first output token
    vector: bytes = b""  # of a pooled request, with `finish`; see `wire.Finished`


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The request is in progress without new tokens."""


@dataclass(frozen=True, slots=True)
class ResumableStream:
    """A stream to resume."""

    request: wire.Request  # with all known tokens
    finish: wire.FinishReason | None = None  # if it ended
    has_lost_router: bool = False  # the router that it began at was lost or has shut down


class BackendError(Exception):
    """The backend cannot serve or continue a request."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None, can_resume: bool = False
    ) -> None:
        super().__init__(message)
        self.can_resume = can_resume  # at another API server
        self.status = status  # HTTP status before the response has started
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """Generates tokens for the API server."""

    def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Yields deltas in order, the last with `finish`. Closing the iterator aborts the request. Raises BackendError."""
        ...

    def check_quota(self, tenant: str, prompt_tokens: int) -> None:
        """Raises BackendError 429 if a request with as long a prompt would exceed the tenant's quota. Charges nothing."""
        ...

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Takes over the resumable streams of `tenant` among `ids`; `generate` continues them."""
        ...

    async def wait_for_assets(self, name: str = "") -> None:
        """Waits for `assets` and their adapter `name`, if that can help. Ignores other names. Raises BackendError."""
        ...

    def assets(self) -> wire.Assets:
        """Returns the model's assets. Raises BackendError 503 while unknown."""
        ...

    def not_ready(self) -> str | None:
        """Returns why no request can be served."""
        ...
