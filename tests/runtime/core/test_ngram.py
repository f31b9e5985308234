"""N-gram lookups: the longest match of a text of any length, with bounded memory."""

import random
import sys
import tracemalloc
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.core.ngram import MAX_INDEXED_PER_STEP, MAX_MATCH, MAX_MATCHES, RECENT_POSITIONS, NgramProposer


def slow_find(tokens: Sequence[int], count: int) -> tuple[list[int], int]:
    """Reference: of the latest positions after the last two tokens, the longest match, the latest on a tie."""
    end, best = len(tokens), (0, 0)
    positions = [p for p in range(end - 1, 1, -1) if end > 2 and tokens[p - 2 : p] == tokens[end - 2 :]]
    for position in positions[:MAX_MATCHES]:
        same = 2
        while same < min(position, MAX_MATCH) and tokens[position - same - 1] == tokens[end - same - 1]:
            same += 1
        best = max(best, (same, position)) if same > best[0] else best
    if not best[1]:
        return [], 0
    following = list(tokens)
    for _ in range(count):
        following.append(following[best[1] + len(following) - end])
    return following[end:], best[0]


def find(proposer: NgramProposer, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
    """Returns the best match, or no tokens and 0."""
    proposer.extend(tokens, 1 << 30)
    return next(iter(proposer.find(tokens, count)), ([], 0))


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8), st.lists(st.integers(0, 60), max_size=6))
def test_lookup_continues_the_longest_match(tokens: list[int], count: int, stops: list[int]) -> None:
    """Also after earlier calls i shorter lengths."""
    proposer = NgramProposer()
    for length in sorted(stops):
        proposer.extend(tokens[:length], 1 << 30)
    tokens = tokens[max([0, *(stop for stop in stops if stop <= len(tokens))]) :] and tokens
    assert find(proposer, tokens, count) == slow_find(tokens, count)
    matches = proposer.find(tokens, count, MAX_MATCHES)
    assert matches[:1] == proposer.find(tokens, count) and len(matches) <= MAX_MATCHES
    assert [same for _, same in matches] == sorted((same for _, same in matches), reverse=True)


def test_a_repeating_text_continues_past_its_end() -> None:
    assert find(NgramProposer(), [9, 1, 2, 3, 1, 2, 3, 1, 2], 8) == ([3, 1, 2, 3, 1, 2, 3, 1], 5)


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    proposer, tokens = NgramProposer(), [i % 50 for i in range(2 * MAX_INDEXED_PER_STEP + 100)]
    calls = [(proposer.extend(tokens, MAX_INDEXED_PER_STEP), bool(proposer.find(tokens, 4))) for _ in range(4)]
    assert calls == [(MAX_INDEXED_PER_STEP, False), (MAX_INDEXED_PER_STEP, False), (98, True), (0, True)]


def test_lookup_of_a_long_text_is_bounded_and_current() -> None:
    chance = random.Random(3)
    phrase, tokens = (
        [chance.randrange(50_000) for _ in range(40)],
        [chance.randrange(50_000) for _ in range(6 * RECENT_POSITIONS)],
    )
    proposer = NgramProposer()
    tracemalloc.start()
    for length in range(RECENT_POSITIONS // 2, len(tokens), RECENT_POSITIONS // 2):
        proposer.extend(tokens[:length], 1 << 30)
        text = [*tokens[:length], *phrase, *tokens[length : length + RECENT_POSITIONS // 4], *phrase[:20]]
        assert proposer.extend(text, 1 << 30) <= 2 * RECENT_POSITIONS
        assert proposer.find(text, 4)[0] == (phrase[20:24], 20)
        tokens[: len(text)] = text
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < (256 << 10) + 2 * sys.getsizeof(tokens), "in addition to the text"
