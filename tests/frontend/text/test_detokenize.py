"""The incremental detokenizer against the tokenizer's own decode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_frontend.text.detokenize import PieceDetokenizer, WindowDetokenizer, make_detokenizer
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.text import tokenizers

KINDS = {
    "byte level": TextTokenizer(tokenizers.byte_level()),
    "sentencepiece": TextTokenizer(tokenizers.sentencepiece()),
    "sentencepiece without strip": TextTokenizer(tokenizers.sentencepiece(strip=False)),
    "metaspace": TextTokenizer(tokenizers.metaspace()),
    "metaspace never prepended": TextTokenizer(tokenizers.metaspace("never")),
    "no decoder": TextTokenizer(tokenizers.without_decoder()),
    "word pieces": TextTokenizer(tokenizers.word_pieces()),
}
REPLACEMENT = "\ufffd"


def pieces(tokenizer: TextTokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.feed(id) for id in ids), detokenizer.end()]


def token_lists(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, with byte tokens (`<0xNN>`) only as whole characters: the library replaces a run with one bad byte."""
    ids = range(tokenizer.max_token_id + 1)
    plain = [id for id in ids if (token := tokenizer.token(id)) and (not token.startswith("<0x") or token == "<0xZZ>")]
    single = st.sampled_from(plain).map(lambda id: [id])
    if len(plain) == len(ids):
        return st.lists(single, max_size=40).map(flat)
    character = st.characters(codec="utf-8").map(lambda character: [3 + byte for byte in character.encode()])
    return st.lists(single | character, max_size=20).map(flat)


def flat(lists: list[list[int]]) -> list[int]:
    return [id for ids in lists for id in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special_tokens", [True, False], ids=["special skipped", "special shown"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_pieces_joined_are_the_text_of_the_whole(kind: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(token_lists(tokenizer))
    text = tokenizer.decode(ids, skip_special_tokens)
    assert "".join(pieces(tokenizer, ids, skip_special_tokens)) == text
    start, detokenizer = data.draw(st.integers(0, len(ids))), make_detokenizer(tokenizer, skip_special_tokens)
    fed = "".join(map(detokenizer.feed, ids[:start]))
    rest = detokenizer.feed_whole(ids[start:])
    if rest is None:
        rest = "".join(map(detokenizer.feed, ids[start:]))
    assert fed + rest + detokenizer.end() == text


def test_whole_characters_are_joined_at_once() -> None:
    tokenizer = KINDS["byte level"]
    assert make_detokenizer(tokenizer).feed_whole(tokenizer.encode("plain text", False)) == "plain text"
    fox = byte_tokens(tokenizer, "🦊".encode())
    assert make_detokenizer(tokenizer).feed_whole(fox) == "🦊" and make_detokenizer(tokenizer).feed_whole(fox[:-1]) is None


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_a_text_comes_back_without_a_broken_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    text = text.replace(REPLACEMENT, "").replace(tokenizers.WORD_START, "")
    # The tiny sentencepiece vocabulary has no letters: every character is a run of bytes.
    ids = tokenizer.encode(text, False) if kind == "byte level" else [3 + byte for byte in text.encode()]
    decoded = pieces(tokenizer, ids)
    # sentencepiece decoders drop one leading space
    assert "".join(decoded) == (text if kind == "byte level" else text.removeprefix(" "))
    assert REPLACEMENT not in "".join(decoded)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_half_a_character_waits_for_its_rest(kind: str) -> None:
    tokenizer = KINDS[kind]
    fox = "🦊".encode()
    ids = [3 + byte for byte in fox] if kind == "sentencepiece" else byte_tokens(tokenizer, fox)
    assert pieces(tokenizer, ids) == ["", "", "", "🦊", ""]
    assert "".join(pieces(tokenizer, ids[:3])) in (REPLACEMENT, REPLACEMENT * 3)


def byte_tokens(tokenizer: TextTokenizer, raw: bytes) -> list[int]:
    """Returns the ids of single-byte tokens."""
    assert tokenizer.rule is not None
    by_byte = {tokenizer.piece(id, tokenizer.rule): id for id in range(2, 258)}
    return [by_byte[bytes([byte])] if bytes([byte]) in by_byte else by_byte[chr(byte)] for byte in raw]


def test_valid_characters_of_a_broken_byte_run_stay() -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert "".join(pieces(KINDS["sentencepiece"], ids)) == "é" + REPLACEMENT


@pytest.mark.parametrize(
    ("kind", "detokenizer"),
    [
        ("byte level", PieceDetokenizer), ("sentencepiece", PieceDetokenizer), ("metaspace", PieceDetokenizer),
        ("no decoder", WindowDetokenizer), ("word pieces", WindowDetokenizer),
    ],
)  # fmt: skip
def test_the_usual_decoders_cost_one_look_up_per_token(kind: str, detokenizer: type) -> None:
    assert isinstance(make_detokenizer(KINDS[kind]), detokenizer)


def test_an_id_without_a_token_adds_nothing() -> None:
    assert pieces(KINDS["byte level"], [10**6]) == ["", ""]


def test_a_prompt_is_never_cut_by_the_tokenizer_file() -> None:
    assert len(KINDS["sentencepiece"].encode("€€€€€", False)) == 5
