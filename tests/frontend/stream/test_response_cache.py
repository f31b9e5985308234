"""Replayed and recorded streams of the response cache."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.response_cache import (
    MAX_PIECE_TOKENS,
    MAX_PIECES,
    MISS,
    CacheAnswer,
    CachedOutput,
    CacheQuery,
    CacheUse,
    record,
    replay,
    replay_hit,
)
from phalanx_frontend.stream.resume import Item
from phalanx_frontend.text.detokenize import make_detokenizer
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import StoredOutputs, tiny_tokenizer_json, token_ids

REQUEST = wire.Request(id="a", epoch=0, prompt=[5], delivered=[], sampling=wire.Sampling(max_tokens=99, seed=0))


@given(tokens=st.lists(st.integers(0, 9), max_size=200))
async def test_replay_yields_each_token_once_in_pieces(tokens: list[int]) -> None:
    output = CachedOutput(tokens=tokens, finish="stop", cached_tokens=3, seconds=1.0)
    deltas = [item async for item in replay(output) if isinstance(item, Delta)]
    assert [token for delta in deltas for token in delta.tokens] == tokens
    assert [delta.index for delta in deltas] == [sum(len(d.tokens) for d in deltas[:i]) for i in range(len(deltas))]
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert len(deltas) == max(1, min(len(tokens), len(deltas))) <= MAX_PIECES and {d.cached_tokens for d in deltas} == {3}


async def test_other_tasks_run_between_pieces_of_a_long_output() -> None:
    output = CachedOutput(tokens=range(100_000), finish="stop", cached_tokens=0, seconds=1.0)
    turns, sizes = 0, list[int]()

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    async for item in replay(output):
        assert isinstance(item, Delta)
        sizes.append(len(item.tokens))
    other.cancel()
    assert sum(sizes) == 100_000 and max(sizes) <= MAX_PIECE_TOKENS and turns >= len(sizes) - 1


async def recorded(text: str, *, stop: str = "", pieces: int = 4, reads: int = 10**6) -> list[CachedOutput]:
    """Feeds a recorded stream to a reply until it ends or `reads` deltas; returns what was stored."""
    cache, now = StoredOutputs(), iter(range(100))
    reply = Reply(make_detokenizer(TextTokenizer(tiny_tokenizer_json()), True), REQUEST.sampling, [stop] if stop else ())
    ids = token_ids(text)
    size = max(1, len(ids) // pieces)

    async def deltas() -> AsyncIterator[Item]:
        for start in range(0, len(ids), size):
            is_last = start + size >= len(ids)
            yield Delta(index=start, tokens=ids[start : start + size], finish="length" if is_last else None)

    stream = record(deltas(), CacheUse(cache, CacheQuery(REQUEST)), MISS, reply, lambda: float(next(now)))
    async for item in stream:
        assert isinstance(item, Delta)
        reply.feed(item)
        reads -= 1
        if reply.finish is not None or not reads:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return cache.outputs


async def test_stream_ends_well_if_its_output_cannot_be_stored() -> None:
    cache, is_closed = StoredOutputs(fails=True), False
    reply = Reply(make_detokenizer(TextTokenizer(tiny_tokenizer_json()), True), REQUEST.sampling, ())

    async def deltas() -> AsyncIterator[Item]:
        nonlocal is_closed
        try:
            yield Delta(index=0, tokens=[5], finish="length")
            yield Delta(index=1, tokens=[5])
        finally:
            is_closed = True

    stream = record(deltas(), CacheUse(cache, CacheQuery(REQUEST)), MISS, reply, lambda: 0.0)
    item = await anext(stream)
    assert isinstance(item, Delta)
    reply.feed(item)
    await stream.aclose()  # type: ignore[attr-defined]
    assert len(cache.outputs) == 1 and is_closed


TEXT = "once upon a time STOP there was"


async def test_whole_output_is_stored_with_its_duration() -> None:
    (output,) = await recorded(TEXT)
    assert (list(output.tokens), output.finish, output.seconds) == (token_ids(TEXT), "length", 1.0)


async def test_output_up_to_a_stop_string_is_stored() -> None:
    (output,) = await recorded(TEXT, stop="STOP", pieces=1)
    assert output.finish == "stop" and 0 < len(output.tokens) < len(token_ids(TEXT))


async def test_output_without_an_end_is_not_stored() -> None:
    assert await recorded(TEXT, reads=1) == []


@pytest.mark.parametrize(("is_streamed", "reads", "num_sent"), [(True, MAX_PIECES, 1), (True, MAX_PIECES // 2, 0), (False, 1, 1)])
async def test_hit_is_sent_when_its_end_was_read(is_streamed: bool, reads: int, num_sent: int) -> None:
    """A stream in pieces, a whole response in one."""
    cache, output = StoredOutputs(), CachedOutput(tokens=range(32), finish="stop", cached_tokens=0, seconds=1.0)
    answer = CacheAnswer(result="exact", output=output)
    stream = replay_hit(CacheUse(cache, CacheQuery(REQUEST)), answer, output, is_streamed=is_streamed)
    for _ in range(reads):
        await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert cache.num_sent == num_sent


@pytest.mark.parametrize(
    ("answer", "header"),
    [
        (MISS, "miss"),
        (CacheAnswer(result="exact"), "exact"),
        (CacheAnswer(result="semantic", similarity=0.9687), "semantic; similarity=0.97"),
    ],
    ids=str,
)
def test_header_shows_the_result(answer: CacheAnswer, header: str) -> None:
    assert answer.header == header
