"""The text of one request from its tokens, and why it ended. The same for streamed and whole answers.

A token that ends the request (end of sequence, a stop token) is counted but adds no text; a stop string is cut from the
text unless it was asked to stay, and tokens after the one that completed it are neither counted nor shown.
Text leaves in whole tokens: while anything of a token is held back, so is the rest of it and what follows. So text that was
sent is the text of the first `num_whole` tokens, which is where a stream may be taken up again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.text.detokenize import Detokenizer
from phalanx_frontend.text.stop import StopStrings

# What a client asked to see of tokens beside the text, and the tokens themselves, each leaving with the text that it made.


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


class StreamBroken(Exception):
    """The backend broke its promise: indices not in order, or an end without a reason."""


class Reply:
    """One request's answer so far. `finish` is None while it goes on; `stop_reason` is the stop string or stop token.

    `num_whole`: how many tokens had left with all their text after the last `feed`.
    A silent one (`max_tokens` 0: only the prompt was of interest) ends at the first token and shows none.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: wire.Sampling,
        stops: Sequence[str] = (),
        named_stop_ids: Sequence[int] = (),
        include_stop: bool = False,
        wants: Wants = NOTHING,
        is_silent: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._named_stop_ids = frozenset(named_stop_ids)
        self._min_tokens = sampling.min_tokens
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._shown = ShownTokens() if wants.tokens else None
        self._needs_details = wants.details
        self._is_silent = is_silent
        self._kept = ""
        """Text of tokens after the whole ones, as far as it is certain."""
        self.num_whole = 0
        self.prompt_details: list[wire.TokenDetail] = []
        self.finish: wire.FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0

    def feed(self, delta: Delta) -> str:
        """The text that these tokens make certain. Raises StreamBroken."""
        if delta.prompt_details:
            self.prompt_details.extend(delta.prompt_details)
        if delta.cached_tokens > self.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if self._is_silent:
            self.finish = "length" if delta.tokens or delta.finish is not None else None
            return ""
        if delta.tokens and delta.index != self.completion_tokens:
            raise StreamBroken(f"token {delta.index} came where {self.completion_tokens} was next")
        detokenizer, stops, text, whole = self._detokenizer, self._stops, self._kept, 0
        for position, token in enumerate(delta.tokens):
            made = self._feed_token(token)
            if self._shown is not None:
                self._shown.add(token, self._detail(delta, position), len(made))
            text += made if stops is None else self._through_stops(made)
            if self.finish is not None:
                break
            if not detokenizer.is_holding and (stops is None or not stops.is_holding):
                self.num_whole, whole = self.completion_tokens, len(text)
        if self.finish is None and delta.finish is None:
            self._kept = text[whole:]
            return text[:whole]
        if self.finish is None:
            text += self._end()
            self.finish = self.finish or delta.finish
        self._kept, self.num_whole = "", self.completion_tokens
        return text

    def go_on(self, tokens: Sequence[int]) -> str:
        """The text of tokens that the client has already: the reply goes on after them, or has ended with them."""
        wanted, shown = self._needs_details, self._shown
        self._needs_details, self._shown = False, None
        text = self.feed(Delta(self.completion_tokens, list(tokens)))
        self._needs_details, self._shown = wanted, shown
        if shown is not None:
            shown.skip(len(tokens), len(text))
        return text

    def shown(self) -> Sequence[ShownToken]:
        """The tokens that leave with the text of the last `feed`, if any are to be shown."""
        return () if self._shown is None else self._shown.take(self.num_whole)

    def _detail(self, delta: Delta, position: int) -> wire.TokenDetail | None:
        if not self._needs_details:
            return None
        detail = delta.details[position] if position < len(delta.details) else None
        if detail is None:
            raise StreamBroken(f"nothing was told of token {delta.index + position}, though it was asked for")
        return detail

    def _feed_token(self, token: int) -> str:
        """The text that this token makes certain, before any stop string is looked for."""
        self.completion_tokens += 1
        if token in self._stop_ids and self.completion_tokens >= self._min_tokens:
            self.stop_reason = token if token in self._named_stop_ids else None
            if not self._include_stop:
                return ""
        return self._detokenizer.feed(token)

    def _end(self) -> str:
        """What was held back, once the backend has said that no more comes."""
        text = self._through_stops(self._detokenizer.end())
        if self._stops is not None and self._stops.found is None:
            text += self._stops.end()
        return text

    def _through_stops(self, text: str) -> str:
        # Text of the first min_tokens tokens never ends a request.
        if self._stops is None or not text or self.completion_tokens <= self._min_tokens:
            return text
        text = self._stops.feed(text)
        if self._stops.found is not None:
            self.finish = "stop"
            self.stop_reason = self._stops.found
        return text
