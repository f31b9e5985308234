"""Bounds of the stored responses."""

import random
import tracemalloc
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx_router.routing.equality import DIGEST_BYTES
from phalanx_router.routing.response_lru import (
    ENTRY_BYTES,
    TOKEN_BYTES,
    LruBounds,
    ResponseLru,
    StoredQuestion,
    StoredResponse,
)
from phalanx_router.routing.vector_index import packed

WIDE = LruBounds(ttl_s=10.0, max_entries=10**6, max_bytes=10**9)


def entry(count: int = 4, revision: str = "r1", stored_at: float = 0.0, cached_tokens: int = 0) -> StoredResponse:
    return StoredResponse(
        tokens=array("I", range(count)),
        finish="stop",
        cached_tokens=cached_tokens,
        seconds=1.0 + stored_at,
        revision=revision,
        stored_at=stored_at,
    )


def key(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def test_least_recently_used_response_is_dropped_first() -> None:
    responses = ResponseLru(LruBounds(ttl_s=10.0, max_entries=2, max_bytes=10**6))
    responses.put(key(1), entry())
    responses.put(key(2), entry())
    assert responses.get(key(1), 1.0) == entry()
    responses.put(key(3), entry())
    assert list(responses) == [key(1), key(3)]


@pytest.mark.parametrize(("age", "is_found"), [(9.9, True), (10.0, False)])
def test_old_response_is_dropped(age: float, is_found: bool) -> None:
    responses = ResponseLru(WIDE)
    responses.put(key(1), entry(stored_at=5.0))
    assert (responses.get(key(1), 5.0 + age) is not None) == is_found
    assert (len(responses), responses.num_bytes > 0) == (is_found, is_found)


def test_later_response_drops_the_old_ones() -> None:
    responses = ResponseLru(WIDE)
    responses.put(key(1), entry(stored_at=0.0))
    responses.put(key(2), entry(stored_at=8.0))
    responses.get(key(1), 9.0)  # a use does not prolong it
    responses.put(key(3), entry(stored_at=10.0))
    assert list(responses) == [key(2), key(3)]


def test_too_large_response_drops_no_other() -> None:
    responses = ResponseLru(LruBounds(ttl_s=10.0, max_entries=5, max_bytes=ENTRY_BYTES + 10 * TOKEN_BYTES))
    responses.put(key(1), entry(10))
    responses.put(key(2), entry(11))
    assert list(responses) == [key(1)]


def question(conversation: int, text: str = "a") -> StoredQuestion:
    return StoredQuestion(key(conversation), text)


def vector_of(number: int, size: int = 8) -> bytes:
    draw = random.Random(number)
    found = packed([draw.gauss(0, 1) for _ in range(size)])
    assert found is not None
    return found


def test_nearest_questions_have_their_responses() -> None:
    responses = ResponseLru(WIDE)
    for number in range(5):
        asked = replace(entry(number, stored_at=float(number)), question=question(number % 2, f"question {number}"))
        responses.put(key(number), asked, vector_of(number))
    found = responses.nearest(key(0), vector_of(2), 2, 5.0)
    assert (found[0].key, found[0].question, found[0].output_tokens, found[0].is_cut) == (key(2), "question 2", 2, False)
    assert found[0].similarity > max(0.999, found[1].similarity) and found[1].key in (key(0), key(4))
    assert responses.nearest(key(2), vector_of(2), 2, 5.0) == []
    assert [one.key for one in responses.nearest(key(0), vector_of(2), 9, 11.5)] == [key(2), key(4)], "the others are too old"


def test_old_question_after_a_younger_one_is_dropped() -> None:
    responses = ResponseLru(WIDE)
    for number, stored_at in ((1, 5.0), (2, 1.0)):
        responses.put(key(number), replace(entry(stored_at=stored_at), question=question(0)), vector_of(number))
    assert [one.key for one in responses.nearest(key(0), vector_of(2), 9, 12.0)] == [key(1)]
    assert list(responses) == [key(1)]


@given(
    stored=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90), st.booleans()), min_size=1, max_size=150),
    max_bytes=st.sampled_from([0, 3000, 50_000, 100_000, 200_000]),
)
@settings(deadline=None, max_examples=40)
def test_bounds_include_questions_and_vectors(stored: list[tuple[int, int, bool]], max_bytes: int) -> None:
    responses = ResponseLru(LruBounds(ttl_s=1e9, max_entries=120, max_bytes=max_bytes))
    for number, (conversation, size, has_question) in enumerate(stored):
        asked = question(conversation, "x" * size) if has_question else None
        stored_response = replace(entry(size, revision=f"r{number % 2}"), question=asked)
        responses.put(key(number % 100), stored_response, vector_of(number) if has_question else b"")
        assert len(responses) <= 120 and responses.num_bytes <= max_bytes
    for conversation in range(4):
        for found in responses.nearest(key(conversation), vector_of(1), 200, 1.0):
            assert found.key in responses
    responses.retain(["r1"])
    assert responses.num_bytes <= max_bytes
    responses.clear()
    assert responses.num_bytes == responses.index.num_bytes == 0


def test_flood_of_one_conversation_searches_the_graph() -> None:
    responses = ResponseLru(LruBounds(ttl_s=1e9, max_entries=10**6, max_bytes=1 << 20))
    for number in range(2000):
        responses.put(key(number), replace(entry(20), question=question(0, f"question {number}")), vector_of(number, 64))
        assert responses.num_bytes <= 1 << 20
    [newest, *_] = responses.nearest(key(0), vector_of(1999, 64), 4, 1.0)
    assert newest.key == key(1999) and responses.index.num_graph_searches == 1 and 200 < len(responses) < 2000


def test_other_revisions_are_dropped() -> None:
    responses = ResponseLru(WIDE)
    for number, revision in enumerate(["r1", "r2", "r1", "r3"]):
        responses.put(key(number), entry(revision=revision))
    responses.retain(["r2", "r3"])
    assert list(responses) == [key(1), key(3)]
    assert (responses.clear(), len(responses), responses.num_bytes) == (2, 0, 0)


@given(
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=60),
    max_entries=st.integers(0, 20),
    max_bytes=st.integers(0, 20 * ENTRY_BYTES),
)
def test_bounds_hold_under_a_flood_of_distinct_requests(sizes: list[int], max_entries: int, max_bytes: int) -> None:
    responses = ResponseLru(LruBounds(ttl_s=10.0, max_entries=max_entries, max_bytes=max_bytes))
    for number, size in enumerate(sizes):
        responses.put(key(number), entry(size))
        assert len(responses) <= max_entries and responses.num_bytes <= max_bytes
        if max_entries and ENTRY_BYTES + TOKEN_BYTES * size <= max_bytes:
            assert responses.get(key(number), 0.0) is not None, "the newest one that fits is kept"


@pytest.mark.parametrize("conversations", [1, 40, 10**6])
def test_counted_bytes_bound_the_memory_of_questions(conversations: int) -> None:
    """Of few vectors per conversation: those of a graph are outside of Python."""
    responses, texts = ResponseLru(LruBounds(ttl_s=1e9, max_entries=60, max_bytes=10**9)), ["", "x" * 100, "\u20ac" * 30]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(600):
            asked = question(number % conversations, texts[number % 3] + str(number))
            responses.put(key(number), replace(entry(10, cached_tokens=1000 + number), question=asked), vector_of(number, 64))
            memory = tracemalloc.get_traced_memory()[0] - before
            assert number < 20 or memory <= responses.num_bytes, f"{memory / len(responses):.0f} bytes an entry"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 100])
@pytest.mark.parametrize("count", [700, 3000, 5500])
def test_counted_bytes_bound_the_memory(size: int, count: int) -> None:
    """Also while entries are used and replaced, which makes the dicts sparse."""
    responses = ResponseLru(LruBounds(ttl_s=10.0, max_entries=count, max_bytes=10**9))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(4 * count):
            responses.put(key(number), entry(size, stored_at=number / count, cached_tokens=1000 + number))
            responses.get(key(number - count // 3 if number > count else number), number / count)
            if number % 100 == 99:
                memory = tracemalloc.get_traced_memory()[0] - before
                assert number < 99 + count or memory <= responses.num_bytes, f"{memory / len(responses):.0f} bytes an entry"
    finally:
        tracemalloc.stop()
    assert responses.num_bytes == count * (ENTRY_BYTES + TOKEN_BYTES * size)


class Machine(RuleBasedStateMachine):
    """Random operations beside a list of everything stored."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = LruBounds(ttl_s=5.0, max_entries=4, max_bytes=4 * (ENTRY_BYTES + 40))
        self.responses = ResponseLru(self.bounds)
        self.now = 0.0
        self.stored: dict[bytes, StoredResponse] = {}

    @rule(number=st.integers(0, 7), size=st.integers(0, 40), revision=st.sampled_from(["r1", "r2"]))
    def put(self, number: int, size: int, revision: str) -> None:
        self.stored[key(number)] = entry(size, revision, self.now)
        self.responses.put(key(number), self.stored[key(number)])

    @rule(number=st.integers(0, 7))
    def get(self, number: int) -> None:
        found = self.responses.get(key(number), self.now)
        if found is not None:
            assert found == self.stored[key(number)] and self.now - found.stored_at < self.bounds.ttl_s

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(revision=st.sampled_from(["r1", "r2"]))
    def retain(self, revision: str) -> None:
        self.responses.retain([revision])
        self.stored = {k: e for k, e in self.stored.items() if e.revision == revision}

    @precondition(lambda self: len(self.responses) > 0)
    @rule(entries=st.integers(0, 4))
    def bound(self, entries: int) -> None:
        self.bounds = LruBounds(ttl_s=5.0, max_entries=entries, max_bytes=self.bounds.max_bytes)
        self.responses.set_bounds(self.bounds, self.now)

    @invariant()
    def fits(self) -> None:
        kept = [self.stored[k] for k in self.responses]
        assert len(kept) <= self.bounds.max_entries
        assert self.responses.num_bytes == sum(e.num_bytes for e in kept) <= self.bounds.max_bytes


TestMachine = Machine.TestCase
