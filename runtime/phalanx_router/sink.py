"""Who hears what a group says of one request."""

from typing import Protocol

from phalanx_api import wire


class Sink(Protocol):
    """Takes what a group says of one request. Called on the event loop; never blocks."""

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """One token, with what was asked about it."""
        ...

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """What was asked about tokens of the prompt, before the first token."""
        ...

    def cached(self, found: wire.Cached) -> None:
        """What was found of its prompt in the prefix cache, before the first token."""
        ...

    def finished(self, end: wire.Finished) -> None:
        """The request ended by itself."""
        ...

    def refused(self, refused: wire.Refused) -> None:
        """The request does not run there."""
        ...

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group no longer works on it; a leave is what a group that drained does in order. `cause` of its end, if known."""
        ...
