"""Tokens of a text and the text that each token adds, from the bytes of a tokenizer.json."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

# What one token adds to the text, read from the `decoder` of a tokenizer.json.
# A decoder is understood here when the text is the concatenation of pieces that depend on one token each: byte-level BPE
# (GPT-2, Llama 3, Qwen), sentencepiece with byte fallback (Llama 2, Mistral, Gemma) and Metaspace. Then a stream costs one
# look-up per token. Other decoders give None, and the detokenizer decodes windows of tokens instead.

WORD_START = "▁"
"""The character that sentencepiece writes for a space."""


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How tokens become text. `piece` gives the bytes of a token; the rest says what happens to the start of the text.

    At most `strip_left` leading characters equal to `strip_char` are dropped. `bare_first` drops every space that stands
    for WORD_START in the first token.
    """

    piece: Callable[[str], bytes]
    strip_char: str = " "
    strip_left: int = 0
    bare_first: bool = False


def byte_of_character() -> dict[str, int]:
    """The byte behind each character of byte-level BPE: printable Latin-1 is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in table.values()]
    return table | {chr(0x100 + position): byte for position, byte in enumerate(others)}


_BYTE_OF_CHARACTER = byte_of_character()


def byte_level_piece(token: str) -> bytes:
    """Bytes of a byte-level token. One with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """The byte of a token spelled `<0xNN>`, or None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def replacing_piece(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    """A piece function that replaces strings in order, then reads `<0xNN>` as a byte when `byte_fallback`."""

    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and (byte := fallback_byte(token)) is not None:
            return byte
        return token.encode()

    return piece


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule | None:
    """The rule of a tokenizer.json's `decoder`, or None when its text is no concatenation of pieces."""
    if decoder is None:
        return None
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return PieceRule(byte_level_piece)
    if names == ["Metaspace"]:
        replaced = [(steps[0].get("replacement", WORD_START), " ")]
        return PieceRule(replacing_piece(replaced, byte_fallback=False), bare_first=steps[0].get("prepend_scheme") != "never")
    return _sentencepiece_rule(steps, names)


def _sentencepiece_rule(steps: list[dict[str, Any]], names: list[str]) -> PieceRule | None:
    """Replace... ByteFallback? Fuse Strip? in this order, the strip only on the left; anything else is None."""
    replacements: list[tuple[str, str]] = []
    position = 0
    while position < len(names) and names[position] == "Replace":
        pattern = steps[position]["pattern"]
        if "String" not in pattern:
            return None
        replacements.append((pattern["String"], steps[position]["content"]))
        position += 1
    rest = names[position:]
    byte_fallback = rest[:1] == ["ByteFallback"]
    piece = replacing_piece(replacements, byte_fallback)
    match rest[1:] if byte_fallback else rest:
        case ["Fuse"]:
            return PieceRule(piece)
        case ["Fuse", "Strip"] if steps[-1]["stop"] == 0:
            return PieceRule(piece, strip_char=steps[-1]["content"], strip_left=steps[-1]["start"])
        case _:
            return None


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
