"""What a client asked to see of tokens beside the text, and the tokens themselves, each leaving with the text that it made."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire


@dataclass(frozen=True, slots=True)
class Wants:
    """What is shown of each token. `logprobs` k: its own and those of the k most probable ones; None shows none.

    `as_ids` writes a token as `token_id:7` where it would be text. `prompt_logprobs` is the same k for tokens of the prompt.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    gaps: bool = False
    token_ids: bool = False
    as_ids: bool = False

    @property
    def details(self) -> bool:
        """Whether the backend has to tell something of each token."""
        return self.logprobs is not None or self.gaps

    @property
    def tokens(self) -> bool:
        """Whether anything but text is shown at all."""
        return self.details or self.token_ids


NOTHING = Wants()
"""Text alone."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token: where its text starts, in characters of its choice's output, and what the backend told of it."""

    id: int
    start: int
    detail: wire.TokenDetail | None = None


class ShownTokens:
    """Tokens of one choice that were counted and not yet shown.

    A token leaves with the text it made: one whose text is held back (half a character, what may become a stop string) waits for
    it. So every counted token is shown exactly once, in order.
    """

    def __init__(self) -> None:
        self._waiting: deque[ShownToken] = deque()
        self._made = 0
        self._taken = 0

    def add(self, token: int, detail: wire.TokenDetail | None, num_chars: int) -> None:
        """One more token, which made this many characters certain."""
        self._waiting.append(ShownToken(token, self._made, detail))
        self._made += num_chars

    def skip(self, num_tokens: int, num_chars: int) -> None:
        """Counts tokens that were shown before, and their characters."""
        self._taken += num_tokens
        self._made += num_chars

    def take(self, num_tokens: int) -> list[ShownToken]:
        """Those of the choice's first `num_tokens` tokens that have not left yet."""
        taken = [self._waiting.popleft() for _ in range(num_tokens - self._taken)]
        self._taken = num_tokens
        return taken


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown before the output: its text, and where its tokens start in it, if tokens are shown."""

    text: str
    starts: Sequence[int] = ()

    def tokens(self, prompt: Sequence[int], details: Sequence[wire.TokenDetail]) -> list[ShownToken]:
        """The prompt's tokens, their starts before that of the output. The first has no detail: nothing comes before it."""
        told = zip(prompt, self.starts, [None, *details], strict=True)
        return [ShownToken(id, start - len(self.text), detail) for id, start, detail in told]
