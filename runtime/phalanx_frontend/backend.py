"""Interface between the API server and what generates: token ids and sampling parameters in, indexed tokens out.

The runtime implements it over its local engine, the router over the groups of a service.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx_api import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Output tokens that follow those already delivered. The last delta carries `finish`."""

    index: int  # output index of the first token
    tokens: list[int]
    finish: wire.FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens found in a prefix cache; set in every delta with tokens
    details: Sequence[wire.TokenDetail | None] = ()  # parallel to `tokens` if logprobs were requested, else empty
    prompt_details: Sequence[wire.TokenDetail] = ()
    """Prompt logprobs, in order from prompt token 1 over all deltas of the request; empty after its first output token."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The request is in progress without new tokens; the server may send a comment to keep the connection open."""


@dataclass(frozen=True, slots=True)
class ResumableStream:
    """A stream to resume."""

    request: wire.Request  # with all tokens known of it
    finish: wire.FinishReason | None = None  # reason, if it ended


class BackendError(Exception):
    """The backend cannot serve or continue a request.

    `status` is the HTTP status if the response has not started, `code` the reason in one word. `can_resume`: the stream is
    interrupted and the client may resume it at another API server.
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
    """Generates tokens for the API server."""

    def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Yields deltas in order of index, each index once, the last with `finish`.

        Closing the iterator early aborts the request. Raises BackendError.
        """
        ...

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Takes over the streams among `ids` that belong to `tenant` and can be resumed, by id.

        Their present connections lose them, and `generate` continues such a request from its last token. Streams of other
        tenants are unaffected.
        """
        ...

    async def wait_for_assets(self) -> None:
        """Returns when `assets` are known or waiting cannot help. Raises BackendError."""
        ...

    def assets(self) -> wire.Assets:
        """Returns the model's tokenizer files and limits. Raises BackendError 503 until they are known."""
        ...

    def not_ready(self) -> str | None:
        """Returns why no request can be served now, or None if requests can. Used by /readyz."""
        ...
