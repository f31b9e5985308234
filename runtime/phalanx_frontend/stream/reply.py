"""Text and finish reason of one choice, from its tokens; the same for streamed and whole responses.

A token that ends the request (EOS, a stop token) is counted but adds no text. A stop string is removed from the text unless
`include_stop_str_in_output` is set; tokens after the one that completes it are neither counted nor shown. Text is sent in whole
tokens: while a part of a token's text is held back, so are its rest and all that follows. So sent text is the text of the first
`num_whole` tokens, from which a stream can be resumed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.text.detokenize import Detokenizer
from phalanx_frontend.text.stop import StopStrings

# Token fields that a client requested in addition to the text; each token is shown with its text.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFields:
    """Fields shown of each token."""

    logprobs: int | None = None  # number of top logprobs in addition to the token's own; None shows no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    gaps: bool = False
    token_ids: bool = False
    as_ids: bool = False  # writes a token as `token_id:7` in place of its text

    @property
    def needs_details(self) -> bool:
        """Whether the backend must return details of each token."""
        return self.logprobs is not None or self.gaps

    @property
    def has_tokens(self) -> bool:
        """Whether any token field is shown."""
        return self.needs_details or self.token_ids


TEXT_ONLY = ShownFields()
"""Text only."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token with its fields."""

    id: int
    start: int  # start of its text, in characters of its choice's output
    detail: wire.TokenDetail | None = None  # from the backend


class ShownTokens:
    """Tokens of one choice that were counted and not yet shown.

    A token is shown with its text. If its text is held back (an incomplete character, a possible stop string), so is the token:
    every counted token is shown exactly once, in order.
    """

    def __init__(self) -> None:
        self._waiting: deque[ShownToken] = deque()
        self._made = 0
        self._taken = 0

    def add(self, token: int, detail: wire.TokenDetail | None, num_chars: int) -> None:
        """Adds a token that made `num_chars` more characters certain."""
        self._waiting.append(ShownToken(token, self._made, detail))
        self._made += num_chars

    def skip(self, num_tokens: int, num_chars: int) -> None:
        """Counts tokens that were shown before the stream was resumed, and their characters."""
        self._taken += num_tokens
        self._made += num_chars

    def take(self, num_tokens: int) -> list[ShownToken]:
        """Returns the tokens among the choice's first `num_tokens` that were not shown yet."""
        taken = [self._waiting.popleft() for _ in range(num_tokens - self._taken)]
        self._taken = num_tokens
        return taken


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt shown before the output. `starts`: start of each token in `text`; empty if no tokens are shown."""

    text: str
    starts: Sequence[int] = ()

    def tokens(self, prompt: Sequence[int], details: Sequence[wire.TokenDetail]) -> list[ShownToken]:
        """Returns the prompt's tokens, with starts below that of the output. The first has no detail: no token precedes it."""
        rows = zip(prompt, self.starts, [None, *details], strict=True)
        return [ShownToken(id, start - len(self.text), detail) for id, start, detail in rows]


class StreamBroken(Exception):
    """The backend violated its protocol: indices out of order, or an end without a finish reason."""


class Reply:
    """State of one choice.

    `finish`: None while it is in progress. `stop_reason`: stop string or stop token. `num_whole`: number of tokens whose text was
    returned completely by the last `feed`. With `is_silent` (`max_tokens` 0) it ends at the first token and shows no token.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: wire.Sampling,
        stops: Sequence[str] = (),
        named_stop_ids: Sequence[int] = (),
        include_stop: bool = False,
        wants: ShownFields = TEXT_ONLY,
        is_silent: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._named_stop_ids = frozenset(named_stop_ids)
        self._min_tokens = sampling.min_tokens
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._shown = ShownTokens() if wants.has_tokens else None
        self._needs_details = wants.needs_details
        self._is_silent = is_silent
        self._kept = ""
        """Certain text of tokens after the whole ones."""
        self.num_whole = 0
        self.prompt_details: list[wire.TokenDetail] = []
        self.finish: wire.FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0

    def feed(self, delta: Delta) -> str:
        """Returns the text that these tokens make certain. Raises StreamBroken."""
        if delta.prompt_details:
            self.prompt_details.extend(delta.prompt_details)
        if delta.cached_tokens > self.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if self._is_silent:
            self.finish = "length" if delta.tokens or delta.finish is not None else None
            return ""
        if delta.tokens and delta.index != self.completion_tokens:
            raise StreamBroken(f"the backend sent token {delta.index}; expected {self.completion_tokens}")
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

    def skip_delivered(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens that the client already has; the reply continues after them, or ended with them."""
        wanted, shown = self._needs_details, self._shown
        self._needs_details, self._shown = False, None
        text = self.feed(Delta(index=self.completion_tokens, tokens=list(tokens)))
        self._needs_details, self._shown = wanted, shown
        if shown is not None:
            shown.skip(len(tokens), len(text))
        return text

    def shown(self) -> Sequence[ShownToken]:
        """Returns the tokens shown with the text of the last `feed`; empty if no token fields are requested."""
        return () if self._shown is None else self._shown.take(self.num_whole)

    def _detail(self, delta: Delta, position: int) -> wire.TokenDetail | None:
        if not self._needs_details:
            return None
        detail = delta.details[position] if position < len(delta.details) else None
        if detail is None:
            raise StreamBroken(f"the backend sent no logprobs of token {delta.index + position}, which were requested")
        return detail

    def _feed_token(self, token: int) -> str:
        """Returns the text that this token makes certain, before the stop string search."""
        self.completion_tokens += 1
        if token in self._stop_ids and self.completion_tokens >= self._min_tokens:
            self.stop_reason = token if token in self._named_stop_ids else None
            if not self._include_stop:
                return ""
        return self._detokenizer.feed(token)

    def _end(self) -> str:
        """Returns the text held back, after the backend's last delta."""
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
