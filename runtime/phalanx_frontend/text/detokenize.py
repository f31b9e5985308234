"""Incremental detokenizer: text of a token stream, never half a character.

The joined pieces equal the tokenizer's own decode: always for byte-level decoders, and for byte-fallback decoders if every run of
bytes is valid UTF-8. For a run with one invalid byte the library returns U+FFFD for the whole run; a stream cannot withdraw text
that it sent, so the valid characters of the run remain here.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from phalanx_frontend.text.tokenizer import PieceRule, TextTokenizer

CONTEXT_TOKENS = 8
"""Preceding tokens decoded again as context: enough for any character and word start."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns the tokens of one request into text incrementally."""

    @property
    def is_holding(self) -> bool:
        """Whether some text of the tokens fed so far is held back."""
        ...

    def feed(self, token: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        ...

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters."""
        ...


def make_detokenizer(tokenizer: TextTokenizer, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Detokenizer:
    """Returns the fastest detokenizer that this tokenizer allows, for one request.

    `after`: tokens whose text precedes. With them the decoder keeps what it drops only at the start of a text.
    """
    if tokenizer.rule is None:
        return WindowDetokenizer(tokenizer, skip_special_tokens, after)
    return PieceDetokenizer(tokenizer, tokenizer.rule, skip_special_tokens, bool(after))


class PieceDetokenizer:
    """One look-up per token; a UTF-8 decoder holds incomplete characters."""

    def __init__(self, tokenizer: TextTokenizer, rule: PieceRule, skip_special_tokens: bool, is_continued: bool = False) -> None:
        self._tokenizer = tokenizer
        self._rule = rule
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_holding = False
        self._strip_left = 0 if is_continued else rule.strip_left
        self._bare_first = rule.bare_first and not is_continued

    def feed(self, token: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        if token in self._skipped:
            return ""
        piece = self._tokenizer.piece(token, self._rule)
        if self.is_holding or isinstance(piece, bytes):
            piece = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
            self.is_holding = self._utf8.getstate()[0] != b""
        if self._strip_left or self._bare_first:
            return self._start(piece)
        return piece

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters."""
        return self._utf8.decode(b"", final=True)

    def _start(self, text: str) -> str:
        """Returns `text` at the start of the output without what the rule drops there."""
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
    """Decodes the tokens since the last certain text, with preceding tokens as context. For decoders without a piece rule."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # _context was sent and is decoded again as context; _fresh is not sent yet.
        self._context: list[int] = list(after[-CONTEXT_TOKENS:])
        self._fresh: list[int] = []

    @property
    def is_holding(self) -> bool:
        """Whether a token is held back until the following tokens."""
        return bool(self._fresh)

    def feed(self, token: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        self._fresh.append(token)
        text = self._fresh_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._context, self._fresh = self._fresh, []
        return text

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters."""
        return self._fresh_text()

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip_special_tokens)
        return self._tokenizer.decode(self._context + self._fresh, self._skip_special_tokens)[len(before) :]
