"""Tokens of a text and the text that each token adds, from the bytes of a tokenizer.json."""

import json
from typing import Any

from tokenizers import Tokenizer

from phalanx_frontend.text.pieces import PieceRule, piece_rule


class TextTokenizer:
    """A model's tokenizer. Encoding is thread-safe; pieces are remembered by id as they are first asked for."""

    def __init__(self, tokenizer_json: bytes) -> None:
        document: dict[str, Any] = json.loads(tokenizer_json)
        # A tokenizer saved after training may still cut or pad its input: a prompt never is.
        document["truncation"] = None
        document["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self.rule: PieceRule | None = piece_rule(document.get("decoder"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self.max_token_id: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._pieces: dict[int, str | bytes] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Special tokens written out in it are recognised. Raises UnicodeEncodeError on lone surrogates."""
        text.encode()  # the library answers half a surrogate pair with a TypeError
        # The batch call lets other threads run meanwhile, the single one does not.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of tokens by the library's own decoder: the twin of the incremental one, and its fallback."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, id: int) -> str | None:
        """A token as the vocabulary spells it, or None for an id that has none."""
        token: str | None = self._tokenizer.id_to_token(id)
        return token

    def piece(self, id: int, rule: PieceRule) -> str | bytes:
        """What a token adds: text when it is whole characters, else bytes. An id without a token adds nothing."""
        piece = self._pieces.get(id)
        if piece is None:
            token = self.token(id)
            raw = b"" if token is None else rule.piece(token)
            try:
                piece = raw.decode()
            except UnicodeDecodeError:
                piece = raw
            self._pieces[id] = piece
        return piece

    def token_bytes(self, id: int) -> bytes | None:
        """What a token alone spells, special ones as they are written; None for an id that has no token."""
        token = self.token(id)
        if token is None:
            return None
        if id in self.special_ids:
            return token.encode()
        return self.decode([id], False).encode() if self.rule is None else self.rule.piece(token)
