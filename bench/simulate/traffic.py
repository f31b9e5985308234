"""Loads of the fleet: requests of traces or random ones, equal for equal seeds."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.router.replay import Arrival, read_trace

BATCH_S = 3.0
"""Mooncake's timestamps are those of batches of 3 s."""


def speed_up(arrivals: Iterable[Arrival], speed: float, limit: int | None = None) -> list[Arrival]:
    return [replace(arrival, at_s=arrival.at_s / speed) for arrival in islice(arrivals, limit)]


def waves(arrivals: Sequence[Arrival], low: float, high: float, period_s: float) -> list[Arrival]:
    """Returns a trace at a rate that oscillates between `low` and `high` times its own, starting at `low`."""
    at_s, before_s, result = 0.0, arrivals[0].at_s if arrivals else 0.0, []
    for arrival in arrivals:
        speed = (low + high) / 2 - (high - low) / 2 * math.cos(2 * math.pi * at_s / period_s)
        at_s += (arrival.at_s - before_s) / speed
        before_s = arrival.at_s
        result.append(replace(arrival, at_s=at_s))
    return result


def repeat(arrivals: Sequence[Arrival]) -> list[Arrival]:
    later_s = arrivals[-1].at_s + 0.1 if arrivals else 0.0
    return [*arrivals, *(replace(arrival, at_s=arrival.at_s + later_s) for arrival in arrivals)]


def shifted(arrivals: Iterable[Arrival], seed: int, share: float, length: int) -> list[Arrival]:
    """Returns a part of a trace from time 0 on; each seed starts elsewhere and wraps around."""
    trace = list(arrivals)
    count = max(1, int(min(length, len(trace)) * share))
    first = random.Random(seed).randrange(len(trace)) if seed else 0
    rotated = trace[first:] + [replace(arrival, at_s=arrival.at_s + trace[-1].at_s + 0.1) for arrival in trace[:first]]
    return [replace(arrival, at_s=arrival.at_s - rotated[0].at_s) for arrival in rotated[:count]]


def jittered(arrivals: Iterable[Arrival], rng: random.Random) -> Iterator[Arrival]:
    """Returns the requests at random times within their batch, in order."""
    spread = [replace(arrival, at_s=arrival.at_s + rng.random() * BATCH_S) for arrival in arrivals]
    yield from sorted(spread, key=lambda arrival: arrival.at_s)


def reasoning(rate: float, count: int, rng: random.Random) -> list[Arrival]:
    """Returns prompts of about 600 tokens, log-normal, with outputs of about 1,800; arrivals in bursts (Gamma, CV 3)."""
    at_s, arrivals = 0.0, []
    cv = 3.0
    for _ in range(count):
        at_s += rng.gammavariate(1 / cv**2, cv**2 / rate)
        prompt = int(min(8192, max(16, rng.lognormvariate(6.0, 0.9))))
        output = int(min(8192, max(16, rng.lognormvariate(7.1, 0.9))))
        arrivals.append(Arrival(at_s, prompt, output))
    return arrivals


def azure(traces: Path) -> Iterator[Arrival]:
    """Reads Azure's conversations of 2023, which have no prefix information."""
    return read_trace(traces / "AzureLLMInferenceTrace_conv.csv")


def mooncake(traces: Path) -> Iterator[Arrival]:
    """Reads Mooncake's conversations with shared blocks."""
    return read_trace(traces / "mooncake_conversation_trace.jsonl")
