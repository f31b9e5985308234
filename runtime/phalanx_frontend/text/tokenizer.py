"""Token ids of a text, and the text of each token."""

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from phalanx_frontend.text.cuts import Owner, RecentParts, has_cuts

# A piece rule exists if text is the concatenation of pieces that depend on one token each. A stream then costs one look-up per
# token.

RECENT_BYTES = 4 << 20
"""Of `RecentEncodings`."""
RECENT_CHARS = 512
"""Shorter texts are tokenized in less than a tenth of a millisecond."""
ENTRY_BYTES = 512
"""Upper bound of the memory of an entry, in addition to its texts and ids."""
WORD_START = "▁"
"""sentencepiece's spelling of a space."""


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How tokens become text."""

    piece: Callable[[str], bytes]  # returns the bytes of a token
    strip_char: str = " "
    strip_left: int = 0  # maximum leading `strip_char` to drop
    bare_first: bool = False  # drops spaces for WORD_START in the first token


def byte_of_character() -> dict[str, int]:
    """Returns the bytes of byte-level BPE: printable Latin-1 is itself, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    remaining = [byte for byte in range(0x100) if byte not in table.values()]
    return table | {chr(0x100 + position): byte for position, byte in enumerate(remaining)}


_BYTE_OF_CHARACTER = byte_of_character()


def byte_level_piece(token: str) -> bytes:
    """Returns the bytes of a byte-level token; others are plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """Returns the byte of a token `<0xNN>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def replacing_piece(replacements: list[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    """Returns a piece function that replaces strings in order, then reads `<0xNN>`."""

    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and (byte := fallback_byte(token)) is not None:
            return byte
        return token.encode()

    return piece


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule | None:
    """Returns the rule of a `decoder`, if it has one."""
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
    """Accepts the steps Replace... ByteFallback? Fuse Strip?, stripping only on the left."""
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


@dataclass(frozen=True, slots=True)
class TextKey:
    """A text of one owner, and how it is tokenized."""

    owner: Owner
    text: str
    add_special_tokens: bool


class RecentEncodings:
    """Token ids of the latest long texts, bounded in bytes: those who send one again need not wait for the tokenizer.

    Bound to one event loop.
    """

    def __init__(self, max_bytes: int = RECENT_BYTES) -> None:
        self.parts = RecentParts()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ids: dict[TextKey, array[int]] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, key: TextKey) -> list[int] | None:
        """Returns the ids of a text, and makes it the most recently used."""
        ids = self._ids.pop(key, None)
        if ids is None:
            return None
        self._ids[key] = ids
        return ids.tolist()

    def put(self, key: TextKey, ids: Sequence[int]) -> None:
        """Adds a text, unless it is short, or takes more than an eighth of the bytes."""
        if len(key.text) < RECENT_CHARS or key in self._ids:
            return
        packed = array("I", ids)
        size = _size_of(key, packed)
        if size > self._max_bytes // 8:
            return
        self._ids[key] = packed
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._ids))
            self.num_bytes -= _size_of(oldest, self._ids.pop(oldest))

    def clear(self) -> None:
        """Removes all."""
        self.parts.clear()
        self._ids, self.num_bytes = {}, 0


def _size_of(key: TextKey, ids: "array[int]") -> int:
    return ENTRY_BYTES + sys.getsizeof(key.text) + sum(map(sys.getsizeof, key.owner)) + sys.getsizeof(ids)


def fitted_lengths(lengths: list[int], room: int) -> list[int]:
    """Returns the lengths of one or two texts after the longer one lost tokens until both fit `room`, or all are lost."""
    room = max(0, room)
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    half = room // 2
    if min(first, second) <= half:
        return [first, room - first] if first <= second else [room - second, second]
    return [room - half, half] if first >= second else [half, room - half]


_PLACES = (2**32 - 2, 2**32 - 1)
"""Ids that no vocabulary has. Each represents a text while the tokenizer joins two."""


def _is_tag(token: str) -> bool:
    return token.startswith("<") and token.endswith(">")


def _place(id: int) -> Encoding:
    """Returns an encoding with this id alone."""
    encoding = Encoding()
    encoding.pad(1, pad_id=id)
    return encoding


class TextTokenizer:
    """A model's tokenizer, thread-safe for encoding."""

    def __init__(self, tokenizer_json: bytes) -> None:
        document: dict[str, Any] = json.loads(tokenizer_json)
        self.content_hash: str = hashlib.sha256(tokenizer_json).hexdigest()
        # Truncation and padding of training are wrong for prompts.
        document["truncation"] = None
        document["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self.rule: PieceRule | None = piece_rule(document.get("decoder"))
        self.has_cuts: bool = has_cuts(document)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: id for id, token in added.items() if token.special}
        self.special_ids: frozenset[int] = frozenset(self.special_tokens.values())
        self.added_tokens: frozenset[str] = frozenset(token.content for token in added.values())
        self.grammar_tokens: dict[str, int] = {
            token.content: id for id, token in added.items() if token.special or _is_tag(token.content)
        }
        """Added tokens that a grammar must name: llguidance matches them with no text."""
        self.max_token_id: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._pieces: dict[int, str | bytes] = {}
        self._joints: dict[tuple[bool, bool], list[tuple[int, int]]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns token ids of `text`. Raises UnicodeEncodeError for lone surrogates."""
        text.encode()  # the library raises TypeError for lone surrogates
        # The batch call releases the GIL, the single one does not.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_recent(self, text: str, add_special_tokens: bool, recent: RecentParts, owner: Owner) -> list[int]:
        """Returns what `encode` does, of a tokenizer that `has_cuts`. Raises UnicodeEncodeError."""
        of_text, ids = recent.encode(owner, text, partial(self.encode, add_special_tokens=False)), list[int]()
        for id, _ in self._joint(False, add_special_tokens):
            ids += of_text if id in _PLACES else [id]
        return ids

    def encode_texts(
        self,
        text: str,
        second: str | None,
        add_special_tokens: bool,
        limit: int | None = None,
        known: Sequence[int] | None = None,
    ) -> tuple[list[int], int]:
        """Returns the token ids of one text or two, as the tokenizer joins them, and the index of the first one with type 1.

        The index is 0 if no token has that type. `limit`: maximum tokens; the longer text loses its last tokens first, special
        tokens stay. `known`: the ids of `text` without special tokens. Raises UnicodeEncodeError as `encode`.
        """
        parts = [self.encode(text, False) if known is None else known]
        parts += [] if second is None else [self.encode(second, False)]
        joint = self._joint(second is not None, add_special_tokens)
        if limit is not None:
            lengths = fitted_lengths([len(ids) for ids in parts], limit - sum(id not in _PLACES for id, _ in joint))
            parts = [ids[:length] for ids, length in zip(parts, lengths, strict=True)]
        ids, types = list[int](), list[int]()
        for id, type_id in joint:
            ids += parts[_PLACES.index(id)] if id in _PLACES else [id]
            types += [type_id] * (len(ids) - len(types))
        return ids, types.index(1) if 1 in types else 0

    def _joint(self, is_pair: bool, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Returns ids and types of joined texts, each represented by one id.

        The library does not join long texts: it keeps what a cut removes, in pieces, and joins each with each of the other text.
        """
        key = is_pair, add_special_tokens
        if key not in self._joints:
            first, second = map(_place, _PLACES)
            joined = self._tokenizer.post_process(first, second if is_pair else None, add_special_tokens)
            self._joints[key] = list(zip(joined.ids, joined.type_ids, strict=True))
        return self._joints[key]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decodes with the library."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, id: int) -> str | None:
        """Returns a token as spelled in the vocabulary."""
        token: str | None = self._tokenizer.id_to_token(id)
        return token

    def piece(self, id: int, rule: PieceRule) -> str | bytes:
        """Returns the text of a token: a string if it has whole characters only."""
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

    def joined_pieces(self, ids: Sequence[int], rule: PieceRule) -> str | bytes:
        """Returns the text of tokens: a string if each has whole characters only."""
        try:
            pieces = [self._pieces[id] for id in ids]
        except KeyError:
            pieces = [self.piece(id, rule) for id in ids]
        if bytes not in map(type, pieces):
            return "".join(cast(list[str], pieces))
        return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])

    def token_bytes(self, id: int) -> bytes | None:
        """Returns the bytes of a token; special tokens as written."""
        token = self.token(id)
        if token is None:
            return None
        if id in self.special_ids:
            return token.encode()
        return self.decode([id], False).encode() if self.rule is None else self.rule.piece(token)
