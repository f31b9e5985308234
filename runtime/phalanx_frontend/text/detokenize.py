"""Incremental detokenizer.

The joined pieces equal the tokenizer's decode, except for byte-fallback runs with an invalid byte: the library replaces the whole
run by U+FFFD, a stream only that byte.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from phalanx_frontend.text.tokenizer import PieceRule, TextTokenizer

CONTEXT_TOKENS = 8
"""Enough context for any character and word start."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NO_IDS: frozenset[int] = frozenset()


class Detokenizer(Protocol):
    """Turns the tokens of one request into text."""

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        ...

    def feed(self, token: int) -> str:
        """Returns the text that is now certain."""
        ...

    def feed_whole(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens that end with a whole character, in a fraction of the time; null if they must be fed."""
        ...

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters."""
        ...


def make_detokenizer(
    tokenizer: TextTokenizer, skip_special_tokens: bool = True, after: Sequence[int] = (), kept: frozenset[int] = NO_IDS
) -> Detokenizer:
    """Returns the fastest detokenizer for a tokenizer. `after`: preceding tokens. `kept`: special tokens that are text."""
    skipped = tokenizer.special_ids - kept if skip_special_tokens else NO_IDS
    if tokenizer.rule is None:
        return WindowDetokenizer(tokenizer, skipped, after)
    return PieceDetokenizer(tokenizer, tokenizer.rule, skipped, bool(after))


class PieceDetokenizer:
    """One look-up per token; a UTF-8 decoder holds incomplete characters."""

    def __init__(self, tokenizer: TextTokenizer, rule: PieceRule, skipped: frozenset[int], is_continued: bool = False) -> None:
        self._tokenizer = tokenizer
        self._rule = rule
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_holding = False
        self._strip_left = 0 if is_continued else rule.strip_left
        self._bare_first = rule.bare_first and not is_continued

    def feed(self, token: int) -> str:
        """Returns the text that is now certain."""
        if token in self._skipped:
            return ""
        piece = self._tokenizer.piece(token, self._rule)
        if self.is_holding or isinstance(piece, bytes):
            piece = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
            self.is_holding = self._utf8.getstate()[0] != b""
        if self._strip_left or self._bare_first:
            return self._start(piece)
        return piece

    def feed_whole(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens unless they end with a part of a character, or there is anything to drop."""
        if self.is_holding or self._strip_left or self._bare_first:
            return None
        if not self._skipped.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._skipped]
        text = self._tokenizer.joined_pieces(tokens, self._rule)
        if isinstance(text, str):
            return text
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        decoded = utf8.decode(text)
        return None if utf8.getstate()[0] else decoded

    def end(self) -> str:
        """Returns the text held back."""
        return self._utf8.decode(b"", final=True)

    def _start(self, text: str) -> str:
        """Returns `text` without what the rule drops at its start."""
        if self._bare_first:
            self._bare_first = False
            return text.replace(" ", "")
        while text and self._strip_left:
            if not text.startswith(self._rule.strip_char):
                self._strip_left = 0
                break
            text = text.removeprefix(self._rule.strip_char)
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """Decodes a window of tokens, for decoders without a piece rule."""

    def __init__(self, tokenizer: TextTokenizer, skipped: frozenset[int], after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        # Sent tokens as context, and unsent ones.
        self._context: list[int] = [token for token in after[-CONTEXT_TOKENS:] if token not in skipped]
        self._fresh: list[int] = []

    @property
    def is_holding(self) -> bool:
        """Whether a token is held back."""
        return bool(self._fresh)

    def feed(self, token: int) -> str:
        """Returns the text that is now certain."""
        if token in self._skipped:
            return ""
        self._fresh.append(token)
        text = self._fresh_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._fresh = self._fresh, []
        return text

    def feed_whole(self, tokens: Sequence[int]) -> str | None:
        """Returns null: text depends on its context."""
        return None

    def end(self) -> str:
        """Returns the text held back."""
        return self._fresh_text()

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._fresh, skip_special_tokens=False)[len(before) :]
