"""Each counted token is shown once, in order, with its text."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.stream.logprobs import MIN_LOGPROB, Spelling, chat_logprobs, completion_logprobs, prompt_logprobs
from phalanx_frontend.stream.reply import Echo, Reply, ShownFields, ShownToken
from phalanx_frontend.text.detokenize import make_detokenizer
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import eos_id, tiny_tokenizer_json, token_ids
from tests.frontend.text.tokenizers import byte_level, metaspace, sentencepiece, word_pieces

TOKENIZER = TextTokenizer(tiny_tokenizer_json())
SAYS = [*token_ids("once upon a 🦊 STOP he"), eos_id()]
WANTS = ShownFields(logprobs=1)
SPELLING = Spelling(TOKENIZER, as_ids=False)


def detail(token: int) -> wire.TokenDetail:
    return wire.TokenDetail(logprob=-float(token), rank=0, top_ids=[token], top_logprobs=[-float(token)])


def play(stop: str, cuts: list[int], skip: bool = True) -> tuple[list[tuple[str, Sequence[ShownToken]]], Reply]:
    """Returns pieces of text and the tokens shown with each, for deltas that start at `cuts`."""
    sampling = wire.Sampling(max_tokens=99, seed=0, stop_token_ids=[eos_id()], logprobs=1)
    reply = Reply(make_detokenizer(TOKENIZER, skip), sampling, (stop,) if stop else (), (), False, WANTS)
    pieces: list[tuple[str, Sequence[ShownToken]]] = []
    for start, end in pairwise(sorted({0, *cuts, len(SAYS)})):
        tokens = SAYS[start:end]
        text = reply.feed(
            Delta(
                index=start,
                tokens=tokens,
                finish="stop" if end == len(SAYS) else None,
                cached_tokens=0,
                details=[detail(token) for token in tokens],
            )
        )
        if text or reply.finish is not None:
            pieces.append((text, reply.take_shown()))
        if reply.finish is not None:
            break
    return pieces, reply


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(1, len(SAYS) - 1), max_size=12), stop=st.sampled_from(["", "STOP", "time", "e", "pon a", "🦊"]))
def test_every_counted_token_is_shown_once_with_its_text(cuts: list[int], stop: str) -> None:
    pieces, reply = play(stop, cuts)
    shown = [token for _, tokens in pieces for token in tokens]
    assert [token.id for token in shown] == SAYS[: reply.completion_tokens]
    assert all(token.detail == detail(token.id) for token in shown)
    sent = 0
    for text, tokens in pieces[:-1]:
        sent += len(text)
        assert all(token.start <= sent for token in tokens)
    starts = [token.start for token in shown]
    assert starts == sorted(starts)
    assert starts == [token.start for _, tokens in play(stop, [])[0] for token in tokens]


def test_token_is_shown_with_its_text() -> None:
    pieces, _ = play("STOPPED", list(range(len(SAYS))))
    held = [token.id for text, tokens in pieces for token in tokens if "STOP" in text]
    assert set(held) >= set(token_ids("STOP")), "the tokens of held text leave with it"


def test_token_of_half_a_character_is_escaped_like_openai() -> None:
    first, *_ = token_ids("🦊")
    raw = TOKENIZER.token_bytes(first)
    assert raw is not None
    escaped = "".join(f"\\x{byte:02x}" for byte in raw)
    assert (SPELLING.completion(first), SPELLING.chat(first)) == (f"bytes:{escaped}", escaped)
    assert SPELLING.bytes(first) == list(raw)
    assert SPELLING.completion(10**6) == "token_id:1000000" and SPELLING.bytes(10**6) is None
    assert Spelling(TOKENIZER, as_ids=True).chat(first) == f"token_id:{first}"


def test_sampled_token_outside_top_logprobs_is_included() -> None:
    a, b, c = token_ids("a")[0], token_ids("b")[0], token_ids("c")[0]
    token = ShownToken(c, 3, wire.TokenDetail(logprob=-9.0, rank=7, top_ids=[a, b], top_logprobs=[-1.0, -2.0]))
    logprobs = completion_logprobs([token], ShownFields(logprobs=2), SPELLING, offset=10)
    assert logprobs == {
        "text_offset": [13], "token_logprobs": [-9.0], "tokens": ["c"], "top_logprobs": [{"a": -1.0, "b": -2.0, "c": -9.0}]
    }  # fmt: skip
    assert completion_logprobs([token], ShownFields(logprobs=0), SPELLING, 0)["top_logprobs"] == [{"c": -9.0}]
    content = chat_logprobs([token], ShownFields(logprobs=1), SPELLING)["content"]
    top = {"token": "a", "logprob": -1.0, "bytes": [97]}
    assert content == [{"token": "c", "logprob": -9.0, "bytes": [99], "top_logprobs": [top]}]


def test_equal_texts_keep_the_more_probable_token() -> None:
    class Twins(Spelling):
        def completion(self, id: int) -> str:
            return "same" if id in (1, 2) else "other"

    token = ShownToken(1, 0, wire.TokenDetail(logprob=-9.0, rank=7, top_ids=[2, 3], top_logprobs=[-0.5, -1.0]))
    logprobs = completion_logprobs([token], ShownFields(logprobs=2), Twins(TOKENIZER, False), 0)
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-9.0], [{"same": -0.5, "other": -1.0}])


def test_impossible_token_has_a_finite_logprob() -> None:
    token = ShownToken(token_ids("a")[0], 0, wire.TokenDetail(logprob=float("-inf"), rank=9, top_ids=[], top_logprobs=[]))
    assert completion_logprobs([token], ShownFields(logprobs=0), SPELLING, 0)["token_logprobs"] == [MIN_LOGPROB]


def test_prompt_logprobs_count_ranks_from_one() -> None:
    a, b = token_ids("a")[0], token_ids("b")[0]
    logprobs = prompt_logprobs([a, b], [wire.TokenDetail(logprob=-3.0, rank=4, top_ids=[a], top_logprobs=[-0.5])], 1, SPELLING)
    assert logprobs == [
        None,
        {
            str(b): {"logprob": -3.0, "rank": 5, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_an_echo_starts_before_the_output() -> None:
    echo = Echo("once", [0, 2])
    assert [(token.start, token.detail) for token in echo.tokens([5, 6], [detail(6)])] == [(-4, None), (-2, detail(6))]
    with pytest.raises(ValueError, match="zip"):
        echo.tokens([5, 6], [])


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace, word_pieces], ids=lambda make: make.__name__)
def test_continuation_text_equals_the_difference_of_whole_texts(make: object) -> None:
    """No space is lost between a prompt and its completion."""
    assert callable(make)
    tokenizer = TextTokenizer(make())
    ids = [id for id in range(3, tokenizer.max_token_id) if tokenizer.token(id) in {"▁once", "upon", "▁a", "once", "Ġa", "a"}]
    for cut in range(1, len(ids)):
        detokenizer = make_detokenizer(tokenizer, True, ids[:cut])
        rest = "".join(detokenizer.feed(id) for id in ids[cut:]) + detokenizer.end()
        assert tokenizer.decode(ids[:cut], True) + rest == tokenizer.decode(ids, True)
