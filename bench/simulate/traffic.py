"""What comes to the fleet: requests of traces, sped up, or drawn; always the same for the same seed."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.replay import Arrival, read_trace

BATCH_S = 3.0
"""Mooncake's times are those of batches of 3 s: a request came at some time in it."""


def sped_up(arrivals: Iterable[Arrival], speed: float, limit: int | None = None) -> list[Arrival]:
    """The first requests of a trace, at so many times its rate."""
    return [replace(one, at_s=one.at_s / speed) for one in islice(arrivals, limit)]


def jittered(arrivals: Iterable[Arrival], chance: random.Random) -> Iterator[Arrival]:
    """Requests of one batch spread over its time, in order."""
    spread = [replace(one, at_s=one.at_s + chance.random() * BATCH_S) for one in arrivals]
    yield from sorted(spread, key=lambda one: one.at_s)


def reasoning(rate: float, count: int, chance: random.Random) -> list[Arrival]:
    """Prompts of about 600 tokens, log-normal, with about 1,800 tokens of answer; arrivals in bursts: Gamma, CV 3."""
    at_s, arrivals = 0.0, []
    cv = 3.0
    for _ in range(count):
        at_s += chance.gammavariate(1 / cv**2, cv**2 / rate)
        prompt = int(min(8192, max(16, chance.lognormvariate(6.0, 0.9))))
        output = int(min(8192, max(16, chance.lognormvariate(7.1, 0.9))))
        arrivals.append(Arrival(at_s, prompt, output))
    return arrivals


def azure(traces: Path) -> Iterator[Arrival]:
    """Azure's conversations of 2023. It tells nothing of prefixes."""
    return read_trace(traces / "AzureLLMInferenceTrace_conv.csv")


def mooncake(traces: Path) -> Iterator[Arrival]:
    """Mooncake's conversations, with the blocks that prompts share."""
    return read_trace(traces / "mooncake_conversation_trace.jsonl")
