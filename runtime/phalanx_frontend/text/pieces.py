"""What one token adds to the text, read from the `decoder` of a tokenizer.json.

A decoder is understood here when the text is the concatenation of pieces that depend on one token each: byte-level
BPE (GPT-2, Llama 3, Qwen), sentencepiece with byte fallback (Llama 2, Mistral, Gemma) and Metaspace. Then a stream costs
one look-up per token. Other decoders give None, and the detokenizer decodes windows of tokens instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
