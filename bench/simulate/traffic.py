"""What comes to the fleet: requests of traces, sped up, or drawn; always the same for the same seed."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.router.replay import Arrival, read_trace

BATCH_S = 3.0
"""Mooncake's times are those of batches of 3 s: a request came at some time in it."""


def sped_up(arrivals: Iterable[Arrival], speed: float, limit: int | None = None) -> list[Arrival]:
    """The first requests of a trace, at so many times its rate."""
    return [replace(one, at_s=one.at_s / speed) for one in islice(arrivals, limit)]


def waves(arrivals: Sequence[Arrival], low: float, high: float, period_s: float) -> list[Arrival]:
    """Requests of a trace at a rate that goes up and down, between so many times its own, the lowest first."""
    at_s, before_s, told = 0.0, arrivals[0].at_s if arrivals else 0.0, []
    for one in arrivals:
        speed = (low + high) / 2 - (high - low) / 2 * math.cos(2 * math.pi * at_s / period_s)
        at_s += (one.at_s - before_s) / speed
        before_s = one.at_s
        told.append(replace(one, at_s=at_s))
    return told


def twice(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """A trace, and behind its end the same again."""
    later_s = arrivals[-1].at_s + 0.1 if arrivals else 0.0
    return [*arrivals, *(replace(one, at_s=one.at_s + later_s) for one in arrivals)]


def shifted(arrivals: Iterable[Arrival], seed: int, share: float, length: int) -> list[Arrival]:
    """A part of a trace that begins elsewhere for each seed, from time 0 on: round the end to its beginning."""
    every = list(arrivals)
    wanted = max(1, int(min(length, len(every)) * share))
    first = random.Random(seed).randrange(len(every)) if seed else 0
    turned = every[first:] + [replace(one, at_s=one.at_s + every[-1].at_s + 0.1) for one in every[:first]]
    return [replace(one, at_s=one.at_s - turned[0].at_s) for one in turned[:wanted]]


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
