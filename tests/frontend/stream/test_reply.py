"""Text, finish reason and counts of one request from its deltas."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.stream.reply import Reply, StreamBroken
from phalanx_frontend.text.detokenize import make_detokenizer
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import eos_id, tiny_tokenizer_json, token_ids

TOKENIZER = TextTokenizer(tiny_tokenizer_json())


def make_reply(
    stops: tuple[str, ...] = (), stop_ids: tuple[int, ...] = (), min_tokens: int = 0, include: bool = False, skip: bool = True
) -> Reply:
    sampling = wire.Sampling(max_tokens=99, seed=0, min_tokens=min_tokens, stop_token_ids=[*stop_ids, eos_id()])
    return Reply(make_detokenizer(TOKENIZER, skip), sampling, stops, stop_ids, include)


def play(reply: Reply, tokens: list[int], finish: wire.FinishReason = "length", cuts: tuple[int, ...] = ()) -> str:
    """Returns the whole text of tokens in deltas that start at `cuts`."""
    text = ""
    edges = sorted({0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)})
    for start, end in pairwise(edges):
        text += reply.feed(Delta(index=start, tokens=tokens[start:end], finish=finish if end == len(tokens) else None))
        if reply.finish is not None:
            break
    return text


SAYS = token_ids("once upon a time STOP here")


@pytest.mark.parametrize(
    ("settings", "tokens", "finish", "expected"),
    [
        ({}, SAYS, "length", ("once upon a time STOP here", "length", None)),
        ({"stops": ("STOP",)}, SAYS, "length", ("once upon a time ", "stop", "STOP")),
        ({"stops": ("STOP",), "include": True}, SAYS, "length", ("once upon a time STOP", "stop", "STOP")),
        ({"stops": ("heretic",)}, SAYS, "length", ("once upon a time STOP here", "length", None)),
        ({"stops": ("once",), "min_tokens": 2}, SAYS, "length", ("once upon a time STOP here", "length", None)),
        ({}, [*token_ids("end"), eos_id()], "stop", ("end", "stop", None)),
        ({"skip": False}, [*token_ids("end"), eos_id()], "stop", ("end", "stop", None)),
        ({"skip": False, "include": True}, [*token_ids("end"), eos_id()], "stop", ("end<eos>", "stop", None)),
        ({"stop_ids": (token_ids("z")[0],)}, token_ids("abz"), "stop", ("ab", "stop", token_ids("z")[0])),
        ({"stop_ids": (token_ids("z")[0],), "include": True}, token_ids("abz"), "stop", ("abz", "stop", token_ids("z")[0])),
        ({"stops": ("zz",)}, token_ids("abz"), "stop", ("abz", "stop", None)),
        ({}, [eos_id()], "stop", ("", "stop", None)),
    ],
    ids=[
        "no end", "stop string", "stop string kept", "beginning of a stop string", "stop within min_tokens", "end of sequence",
        "end of sequence with specials shown", "end of sequence kept", "stop token", "stop token kept",
        "held text at the end", "no text",
    ],
)  # fmt: skip
def test_text_and_reason(
    settings: dict[str, Any], tokens: list[int], finish: wire.FinishReason, expected: tuple[str, str, str | int | None]
) -> None:
    for cuts in [(), tuple(range(len(tokens)))]:
        reply = make_reply(**settings)
        assert (play(reply, tokens, finish, cuts), reply.finish, reply.stop_reason) == expected


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, len(SAYS)), max_size=8), stop=st.sampled_from(["STOP", "time", "e", "never", ""]))
def test_answer_is_independent_of_token_batches(cuts: list[int], stop: str) -> None:
    whole, cut = (make_reply(stops=(stop,) if stop else ()) for _ in range(2))
    assert play(whole, SAYS) == play(cut, SAYS, cuts=tuple(cuts))
    assert (whole.finish, whole.stop_reason, whole.completion_tokens) == (cut.finish, cut.stop_reason, cut.completion_tokens)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    reply = make_reply(stops=("STOP",))
    play(reply, SAYS)
    until_stop = next(n for n in range(len(SAYS) + 1) if "STOP" in TOKENIZER.decode(SAYS[:n], True))
    assert reply.completion_tokens == until_stop < len(SAYS)


def test_an_end_may_come_after_its_last_token() -> None:
    reply = make_reply()
    assert reply.feed(Delta(index=0, tokens=[*token_ids("a"), eos_id()])) == "a"
    assert reply.feed(Delta(index=2, tokens=[], finish="stop", cached_tokens=16)) == ""
    assert (reply.finish, reply.completion_tokens, reply.cached_tokens) == ("stop", 2, 16)


def test_a_token_out_of_order_breaks_the_stream() -> None:
    reply = make_reply()
    reply.feed(Delta(index=0, tokens=[5]))
    with pytest.raises(StreamBroken):
        reply.feed(Delta(index=2, tokens=[5]))


def test_a_character_cut_by_the_end_is_replaced() -> None:
    fox = token_ids("🦊")
    assert len(fox) > 1
    assert play(make_reply(), fox[:1]) == "\ufffd"
