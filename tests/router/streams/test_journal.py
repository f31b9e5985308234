"""Each index is delivered once, in order, and the journal detects the end of a stream."""

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_frontend.backend import Delta
from phalanx_router.streams.journal import Journal, TokenVerdict
from phalanx_router.streams.stream import GroupLost, Stream
from tests.router.fakes import expected, make_request, token_at


def play(journal: Journal, messages: Sequence[tuple[int, int, int]]) -> tuple[list[int], bool]:
    """Delivered tokens of these messages, and whether there was a gap."""
    got, gap = [], False
    for epoch, index, token in messages:
        verdict = journal.accept(epoch, index, token)
        if verdict is TokenVerdict.DELIVER:
            got.append(token)
        gap = gap or verdict is TokenVerdict.GAP
    return got, gap


@given(seed=st.integers(0, 2**32), length=st.integers(1, 40), epochs=st.integers(1, 6))
def test_each_index_is_delivered_once_in_order(seed: int, length: int, epochs: int) -> None:
    """Each epoch continues after the delivered tokens; its messages and late ones of earlier epochs are lost, doubled, mixed."""
    draw = random.Random(seed)
    request = make_request([seed % 97, 3], max_tokens=length)
    journal = Journal(request)
    late: list[tuple[int, int, int]] = []
    got: list[int] = []
    for _ in range(epochs):
        replay = journal.replay()
        assert replay.delivered == got == expected(request.prompt, len(got))
        sent = [(replay.epoch, i, token_at(request.prompt, i)) for i in range(len(got), length)]
        stale = [(epoch, index, token + draw.choice([0, 1])) for epoch, index, token in late]
        messages = [m for m in sent + stale for _ in range(draw.choice([0, 1, 1, 1, 2]))]
        if draw.random() < 0.5:
            draw.shuffle(messages)
        new, gap = play(journal, messages)
        got += new
        assert gap or len(got) == length or all(m not in messages for m in sent[len(new) : len(new) + 1])
        late += sent
        journal.next_epoch()
    last, _ = play(journal, [(journal.epoch, i, token_at(request.prompt, i)) for i in range(len(got), length)])
    assert got + last == expected(request.prompt, length)
    assert journal.finish_reason() == "length"


@pytest.mark.parametrize(
    ("delivered", "sampling", "end"),
    [
        ([], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9]), None),
        ([1, 2], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9]), None),
        ([1, 9], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9]), "stop"),
        ([1, 9], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9], min_tokens=3), None),
        ([1, 2, 3, 4], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9]), "length"),
        ([1, 2, 3, 9], wire.Sampling(max_tokens=4, seed=0, stop_token_ids=[9]), "stop"),
    ],
    ids=["nothing yet", "goes on", "stop token", "stop token too early", "max_tokens", "both"],
)
def test_journal_detects_its_end(delivered: list[int], sampling: wire.Sampling, end: str | None) -> None:
    assert Journal(wire.Request(id="r", epoch=0, prompt=[1], delivered=delivered, sampling=sampling)).finish_reason() == end


def test_request_with_delivered_tokens_continues_after_them() -> None:
    journal = Journal(wire.Request(id="r", epoch=3, prompt=[1], delivered=[5, 6], sampling=wire.Sampling(max_tokens=4, seed=0)))
    assert journal.is_fresh
    assert journal.accept(3, 1, 6) is TokenVerdict.DROP
    assert journal.accept(3, 2, 7) is TokenVerdict.DELIVER
    assert not journal.is_fresh
    journal.next_epoch()
    assert journal.replay() == wire.Request(
        id="r", epoch=4, prompt=[1], delivered=[5, 6, 7], sampling=wire.Sampling(max_tokens=4, seed=0)
    )


async def test_tokens_before_a_setback_are_given_before_it() -> None:
    stream = Stream(make_request(max_tokens=9))
    stream.token(0, 0, 11)
    stream.token(0, 1, 12)
    stream.lost(0, "failed")
    stream.lost(0, "failed again")
    stream.finished(wire.Finished(1, 0, "stop"))
    await stream.wait()
    delta = stream.take()
    assert delta is not None and not isinstance(delta, GroupLost | wire.Refused)
    assert (delta.index, delta.tokens, delta.finish) == (0, [11, 12], None)
    await stream.wait()
    assert stream.take() == GroupLost("failed")
    assert stream.take() is None


async def test_frames_of_an_older_epoch_are_ignored() -> None:
    stream = Stream(make_request())
    stream.journal.next_epoch()
    stream.token(0, 0, 11)
    stream.finished(wire.Finished(1, 0, "stop"))
    stream.refused(wire.Refused(handle=1, epoch=0, status=503, code="c", message="m"))
    stream.lost(0, "failed")
    assert stream.take() is None


def details_of(count: int) -> list[wire.TokenDetail]:
    """Details of prompt tokens 1 to `count`."""
    return [wire.TokenDetail(logprob=-float(position), rank=0, top_ids=[], top_logprobs=[]) for position in range(1, count + 1)]


@given(
    length=st.integers(1, 30),
    groups=st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 8), max_size=8)), max_size=5),
)
def test_prompt_details_are_taken_once(length: int, groups: list[tuple[int, list[int]]]) -> None:
    """Each group sends chunks from token 1 on and is lost after some of them; late chunks of earlier groups are dropped."""
    request = msgspec.structs.replace(
        make_request([1] * (length + 1)), sampling=wire.Sampling(max_tokens=4, seed=0, prompt_logprobs=1)
    )
    journal, taken, every = Journal(request), [], details_of(length)
    for lost_after, sizes in [*groups, (length, [length])]:
        assert journal.accept_prompt(wire.PromptDetails(1, journal.epoch - 1, 1, every)) == []
        start = 1
        for size in sizes:
            if start > min(lost_after, length):
                break
            new = journal.accept_prompt(wire.PromptDetails(1, journal.epoch, start, every[start - 1 : start - 1 + size]))
            assert new is not None
            taken += new
            start += size
        assert journal.replay().sampling == request.sampling, "a client resumes its original request"
        journal.next_epoch()
    assert taken == every


def test_details_that_skip_a_prompt_token_are_a_loss() -> None:
    request = msgspec.structs.replace(make_request([1, 2, 3]), sampling=wire.Sampling(max_tokens=4, seed=0, prompt_logprobs=1))
    stream = Stream(request)
    stream.prompt_details(wire.PromptDetails(1, 0, 2, details_of(1)))
    assert isinstance(stream.take(), GroupLost)


def test_cached_tokens_come_with_this_epochs_first_token() -> None:
    stream = Stream(make_request([1, 2, 3]))
    stream.cached(wire.Cached(1, 7, 3))
    stream.cached(wire.Cached(1, 0, 2))
    stream.token(0, 0, 7)
    assert stream.take() == Delta(index=0, tokens=[7], finish=None, cached_tokens=2)
    stream.lost(0, "failed")
    assert isinstance(stream.take(), GroupLost)
    stream.journal.next_epoch()
    stream.cached(wire.Cached(2, 1, 1))
    stream.token(1, 1, 8)
    assert stream.take() == Delta(index=1, tokens=[8], finish=None, cached_tokens=2), "of several groups the one that found most"


def test_details_leave_with_their_tokens() -> None:
    detail, late = (
        wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[7], top_logprobs=[-1.0]),
        wire.TokenDetail(logprob=-2.0, rank=0, top_ids=[8], top_logprobs=[-2.0]),
    )
    stream = Stream(
        msgspec.structs.replace(make_request([1, 2]), sampling=wire.Sampling(max_tokens=4, seed=0, logprobs=1, prompt_logprobs=0))
    )
    stream.prompt_details(wire.PromptDetails(1, 0, 1, details_of(1)))
    assert stream.take() is None, "nothing leaves before the first token"
    stream.token(0, 0, 7, detail)
    stream.token(0, 0, 7, late)
    stream.token(0, 1, 8, late)
    assert stream.take() == Delta(
        index=0, tokens=[7, 8], finish=None, cached_tokens=0, details=[detail, late], prompt_details=details_of(1)
    )
    stream.token(0, 2, 9, detail)
    assert stream.take() == Delta(index=2, tokens=[9], finish=None, cached_tokens=0, details=[detail])
