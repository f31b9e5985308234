"""Text and finish reason of one choice, from its tokens.

A stop token is counted and adds no text. A stop string is removed unless `include_stop_str_in_output` is set; later tokens are
not counted. Text is sent in whole tokens, where a stream can be resumed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.text.detokenize import Detokenizer
from phalanx_frontend.text.stop import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFields:
    """Fields that a client requested of each token."""

    logprobs: int | None = None  # number of top logprobs; null hides logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    gaps: bool = False
    token_ids: bool = False
    as_ids: bool = False  # writes `token_id:7` in place of text

    @property
    def needs_details(self) -> bool:
        """Whether the backend must return details."""
        return self.logprobs is not None or self.gaps

    @property
    def has_tokens(self) -> bool:
        """Whether any token field is shown."""
        return self.needs_details or self.token_ids


TEXT_ONLY = ShownFields()


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token with its fields."""

    id: int
    start: int  # of its text, in characters of the output
    detail: wire.TokenDetail | None = None


class UnshownTokens:
    """Tokens that were counted and not yet shown. A token is held back with its text."""

    def __init__(self) -> None:
        self._waiting: deque[ShownToken] = deque()
        self._made = 0
        self._taken = 0

    def add(self, token: int, detail: wire.TokenDetail | None, num_chars: int) -> None:
        """Adds a token with the length of its text."""
        self._waiting.append(ShownToken(token, self._made, detail))
        self._made += num_chars

    def skip(self, num_tokens: int, num_chars: int) -> None:
        """Skips tokens that were shown before a resumption."""
        self._taken += num_tokens
        self._made += num_chars

    def take(self, num_tokens: int) -> list[ShownToken]:
        """Returns the unshown tokens among the first `num_tokens`."""
        taken = [self._waiting.popleft() for _ in range(num_tokens - self._taken)]
        self._taken = num_tokens
        return taken


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt shown before the output."""

    text: str
    starts: Sequence[int] = ()  # of each token in `text`, if tokens are shown

    def tokens(self, prompt: Sequence[int], details: Sequence[wire.TokenDetail]) -> list[ShownToken]:
        """Returns the prompt's tokens, at negative positions. The first has no detail."""
        if not self.starts:
            return []
        rows = zip(prompt, self.starts, [None, *details], strict=True)
        return [ShownToken(id, start - len(self.text), detail) for id, start, detail in rows]


NO_ECHO = Echo("")


class StreamBroken(Exception):
    """The backend violated its protocol."""


class Reply:
    """State of one choice."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: wire.Sampling,
        stops: Sequence[str] = (),
        named_stop_ids: Sequence[int] = (),
        include_stop: bool = False,
        shown: ShownFields = TEXT_ONLY,
        is_silent: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._named_stop_ids = frozenset(named_stop_ids)
        self._min_tokens = sampling.min_tokens
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._unshown = UnshownTokens() if shown.has_tokens else None
        self._needs_details = shown.needs_details
        self._is_silent = is_silent  # ends at the first token, without showing it
        self._pending = ""  # text after the whole tokens
        self.num_whole = 0  # tokens with completely returned text
        self.prompt_details: list[wire.TokenDetail] = []
        self.finish: wire.FinishReason | None = None
        self.stop_reason: str | int | None = None  # stop string or stop token
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
        detokenizer, stops, text, whole = self._detokenizer, self._stops, self._pending, 0
        if (made := self._feed_whole(delta.tokens)) is not None:
            self.completion_tokens += len(delta.tokens)
            return self._ended(delta, text + made, len(text) + len(made))
        for position, token in enumerate(delta.tokens):
            made = self._feed_token(token)
            if self._unshown is not None:
                self._unshown.add(token, self._detail(delta, position), len(made))
            text += made if stops is None else self._through_stops(made)
            if self.finish is not None:
                break
            if not detokenizer.is_holding and (stops is None or not stops.is_holding):
                self.num_whole, whole = self.completion_tokens, len(text)
        return self._ended(delta, text, whole)

    def _ended(self, delta: Delta, text: str, whole: int) -> str:
        """Returns the certain part of `text`, of which `whole` characters are of whole tokens: all of it at the end."""
        if self.finish is None and delta.finish is None:
            self._pending = text[whole:]
            return text[:whole]
        if self.finish is None:
            text += self._end()
            self.finish = self.finish or delta.finish
        self._pending, self.num_whole = "", self.completion_tokens
        return text

    def skip_delivered(self, tokens: Sequence[int]) -> str:
        """Returns the text of delivered tokens."""
        needs_details, unshown = self._needs_details, self._unshown
        self._needs_details, self._unshown = False, None
        text = self.feed(Delta(index=self.completion_tokens, tokens=list(tokens)))
        self._needs_details, self._unshown = needs_details, unshown
        if unshown is not None:
            unshown.skip(len(tokens), len(text))
        return text

    def take_shown(self) -> Sequence[ShownToken]:
        """Returns the tokens whose text `feed` returned since the last call."""
        return () if self._unshown is None else self._unshown.take(self.num_whole)

    def _detail(self, delta: Delta, position: int) -> wire.TokenDetail | None:
        if not self._needs_details:
            return None
        detail = delta.details[position] if position < len(delta.details) else None
        if detail is None:
            raise StreamBroken(f"the backend sent no logprobs of token {delta.index + position}, which were requested")
        return detail

    def _feed_whole(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of several tokens at once, as of a stored response; null if each must be looked at."""
        if len(tokens) < 2 or self._stops is not None or self._unshown is not None or not self._stop_ids.isdisjoint(tokens):
            return None
        made = self._detokenizer.feed_whole(tokens)
        if made is not None:
            self.num_whole = self.completion_tokens + len(tokens)
        return made

    def _feed_token(self, token: int) -> str:
        """Returns the text of a token before the stop string search."""
        self.completion_tokens += 1
        if token in self._stop_ids and self.completion_tokens >= self._min_tokens:
            self.stop_reason = token if token in self._named_stop_ids else None
            if not self._include_stop:
                return ""
        return self._detokenizer.feed(token)

    def _end(self) -> str:
        """Returns the text held back, at the end."""
        text = self._through_stops(self._detokenizer.end())
        if self._stops is not None and self._stops.found is None:
            text += self._stops.end()
        return text

    def _through_stops(self, text: str) -> str:
        # The first min_tokens tokens never end a request.
        if self._stops is None or not text or self.completion_tokens <= self._min_tokens:
            return text
        text = self._stops.feed(text)
        if self._stops.found is not None:
            self.finish = "stop"
            self.stop_reason = self._stops.found
        return text
