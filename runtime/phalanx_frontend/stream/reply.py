"""The text of one request from its tokens, and why it ended. The same for streamed and whole answers.

A token that ends the request (end of sequence, a stop token) is counted but adds no text; a stop string is cut from the
text unless it was asked to stay, and tokens after the one that completed it are neither counted nor shown.
Text leaves in whole tokens: while anything of a token is held back, so is the rest of it and what follows. So text that was
sent is the text of the first `num_whole` tokens, which is where a stream may be taken up again.
"""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.shown import NOTHING, ShownToken, ShownTokens, Wants
from phalanx_frontend.text.detokenize import Detokenizer
from phalanx_frontend.text.stop import StopStrings


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
