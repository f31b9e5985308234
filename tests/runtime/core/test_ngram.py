"""Tokens looked up in what a request has: the longest agreement, however long the text, and little memory."""

import random
import sys
import tracemalloc
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.core.ngram import AT_ONCE, LATEST, LONGEST, PLACES, NgramProposer


def slow_find(tokens: Sequence[int], count: int) -> tuple[list[int], int]:
    """By definition: of the latest places behind the last two tokens the one before which most tokens agree, later ones first."""
    end, best = len(tokens), (0, 0)
    places = [p for p in range(end - 1, 1, -1) if end > 2 and tokens[p - 2 : p] == tokens[end - 2 :]]
    for place in places[:PLACES]:
        same = 2
        while same < min(place, LONGEST) and tokens[place - same - 1] == tokens[end - same - 1]:
            same += 1
        best = max(best, (same, place)) if same > best[0] else best
    if not best[1]:
        return [], 0
    following = list(tokens)
    for _ in range(count):
        following.append(following[best[1] + len(following) - end])
    return following[end:], best[0]


def find(lookup: NgramProposer, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
    """The best place alone; nothing and 0 where there is none."""
    lookup.enter(tokens, 1 << 30)
    return next(iter(lookup.find(tokens, count)), ([], 0))


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8), st.lists(st.integers(0, 60), max_size=6))
def test_lookup_continues_the_longest_match(tokens: list[int], count: int, stops: list[int]) -> None:
    """However the tokens came: it looked before at some lengths, or not."""
    lookup = NgramProposer()
    for length in sorted(stops):
        lookup.enter(tokens[:length], 1 << 30)
    tokens = tokens[max([0, *(stop for stop in stops if stop <= len(tokens))]) :] and tokens
    assert find(lookup, tokens, count) == slow_find(tokens, count)
    several = lookup.find(tokens, count, PLACES)
    assert several[:1] == lookup.find(tokens, count) and len(several) <= PLACES
    assert [same for _, same in several] == sorted((same for _, same in several), reverse=True)


def test_a_text_that_repeats_is_proposed_beyond_its_end() -> None:
    assert find(NgramProposer(), [9, 1, 2, 3, 1, 2, 3, 1, 2], 8) == ([3, 1, 2, 3, 1, 2, 3, 1], 5)


def test_a_long_prompt_is_entered_over_several_looks() -> None:
    lookup, tokens = NgramProposer(), [at % 50 for at in range(2 * AT_ONCE + 100)]
    looks = [(lookup.enter(tokens, AT_ONCE), bool(lookup.find(tokens, 4))) for _ in range(4)]
    assert looks == [(AT_ONCE, False), (AT_ONCE, False), (98, True), (0, True)]


def test_lookup_of_a_long_text_is_bounded_and_current() -> None:
    chance = random.Random(3)
    phrase, tokens = [chance.randrange(50_000) for _ in range(40)], [chance.randrange(50_000) for _ in range(6 * LATEST)]
    lookup = NgramProposer()
    tracemalloc.start()
    for length in range(LATEST // 2, len(tokens), LATEST // 2):
        lookup.enter(tokens[:length], 1 << 30)
        text = [*tokens[:length], *phrase, *tokens[length : length + LATEST // 4], *phrase[:20]]
        assert lookup.enter(text, 1 << 30) <= 2 * LATEST
        assert lookup.find(text, 4)[0] == (phrase[20:24], 20)
        tokens[: len(text)] = text
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < (256 << 10) + 2 * sys.getsizeof(tokens), "beside the text itself"
