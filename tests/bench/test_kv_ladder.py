"""The trace of the comparison of rungs."""

from bench.kv_cache.ladder import END_TOKENS, Trace


def test_each_round_visits_all_prefixes_with_new_ends() -> None:
    trace = Trace.draw(num_prefixes=5, length=32, rounds=3, seed=1)
    starts = [tuple(prompt[:-END_TOKENS]) for prompt in trace.prompts]
    rounds = [set(starts[first : first + 5]) for first in range(0, 20, 5)]
    assert len(rounds) == 4 and all(visited == rounds[0] and len(visited) == 5 for visited in rounds)
    assert trace.num_unmeasured == 5 and len({tuple(prompt) for prompt in trace.prompts}) == 20
    assert trace == Trace.draw(5, 32, 3, 1) != Trace.draw(5, 32, 3, 2)
