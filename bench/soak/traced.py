"""Conversations of a trace of requests with blocks (Mooncake's format), at the size of a tiny model's context.

A request continues the newest earlier one of which it has all full blocks, of at least two, and which none has continued.
Turns, shared prefixes and the proportions of lengths and gaps are those of the trace; texts, sampling and behaviour follow from
the seed.
"""

import random
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles

from bench.frame.workload import words
from bench.router.replay import BLOCK_TOKENS, Arrival, read_trace
from bench.soak.record import Settings
from bench.soak.workload import CONTEXT, Conversation, Conversations, Turn, drawn_turn
from bench.soak.workload import conversation as drawn

MOST_PROMPT, MOST_OUTPUT = CONTEXT // 2, CONTEXT // 4
"""Scaled tokens that nine of ten prompts and outputs have at most. Longer ones are cut."""
LEAST_QUESTION = 8
"""Tokens of a question whose turn adds fewer."""
PAUSE_S = 1.0
"""Mean pause before a turn, and mean pause before a conversation."""


def conversations_of(settings: Settings) -> Conversations:
    """Returns the conversations of a run: drawn, or those of its trace.

    Raises OSError for a trace that cannot be read, ValueError for one without blocks.
    """
    if not settings.trace:
        return partial(drawn, settings.seed)
    return TracedConversations(settings.seed, read_trace(Path(settings.trace)))


def joined(arrivals: Iterable[Arrival]) -> list[list[Arrival]]:
    """Returns the requests of each conversation, in order of their first ones. Raises ValueError if none has blocks."""
    found: list[list[Arrival]] = []
    ends: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        full = arrival.blocks[: arrival.input_tokens // BLOCK_TOKENS][1:]  # the first one is of a system prompt
        known = next((ends.pop(block) for block in reversed(full) if block in ends), None)
        if known is None:
            found.append(known := [])
        known.append(arrival)
        if full:
            ends[full[-1]] = known
    if not any(arrival.blocks for requests in found for arrival in requests):
        raise ValueError("the trace has no hash_ids, so its requests are no conversations")
    return found


class TracedConversations:
    """The conversations of a trace by number, again from the first one after the last."""

    def __init__(self, seed: int, arrivals: Iterable[Arrival]) -> None:
        self._seed = seed
        self._requests = joined(arrivals)
        every = [arrival for requests in self._requests for arrival in requests]
        self._prompt_share = _share([arrival.input_tokens for arrival in every], MOST_PROMPT)
        self._output_share = _share([arrival.output_tokens for arrival in every], MOST_OUTPUT)
        starts = _gaps([requests[0].at_s for requests in self._requests])
        later = [_gaps([arrival.at_s for arrival in requests])[1:] for requests in self._requests]
        start_s, later_s = mean(starts) or 1.0, mean([gap for gaps in later for gap in gaps] or [0.0]) or 1.0
        self._pauses_s = [
            [PAUSE_S * start / start_s, *(PAUSE_S * gap / later_s for gap in gaps)]
            for start, gaps in zip(starts, later, strict=True)
        ]

    def __call__(self, number: int) -> Conversation:
        """Returns a conversation."""
        rng = random.Random(f"{self._seed} {number}")
        index = number % len(self._requests)
        requests, pauses_s = self._requests[index], self._pauses_s[index]
        system, *parts = self._parts(requests[0])
        turns = [self._turn(requests[0], "".join(parts), rng, pauses_s[0])]
        for (former, arrival), pause_s in zip(pairwise(requests), pauses_s[1:], strict=True):
            num_new = arrival.input_tokens - former.input_tokens - former.output_tokens
            size = min(MOST_PROMPT, max(LEAST_QUESTION, round(num_new * self._prompt_share)))
            turns.append(self._turn(arrival, self._text(f"question {arrival.blocks[-1:]}", size), rng, pause_s))
        return Conversation(number, system, tuple(turns))

    def _parts(self, arrival: Arrival) -> list[str]:
        """Returns a text for each full block of a prompt, and one for what remains. A byte is a token."""
        size = max(1, round(BLOCK_TOKENS * self._prompt_share))
        num_letters = min(MOST_PROMPT, max(2, round(arrival.input_tokens * self._prompt_share)))
        full = arrival.blocks[: arrival.input_tokens // BLOCK_TOKENS][: num_letters // size]
        parts = [self._text(f"block {block}", size) for block in full]
        rest = self._text(f"rest {arrival.blocks[-1:]}", max(1, num_letters - size * len(full)))
        return [*parts, rest] if parts else ["", rest]

    def _text(self, what: str, size: int) -> str:
        return words(random.Random(f"{self._seed} {what}"), size)[:size]

    def _turn(self, arrival: Arrival, text: str, rng: random.Random, pause_s: float) -> Turn:
        """Turns of equal prompts have equal fields, so that their answers are equal too."""
        max_tokens = min(MOST_OUTPUT, max(2, round(arrival.output_tokens * self._output_share)))
        return drawn_turn(text, max_tokens, random.Random(f"{self._seed} turn {arrival.blocks}"), rng, pause_s)


def _share(lengths: Sequence[int], most: int) -> float:
    long = quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    return min(1.0, most / max(1.0, long))


def _gaps(times: Sequence[float]) -> list[float]:
    """Returns the time from the one before, 0 for the first."""
    return [after - before for before, after in zip([*times[:1], *times], times, strict=False)]
