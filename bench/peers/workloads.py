"""Workloads of seeded token ids, greedy, past the end of sequence. Each run has different prompts.

| | requests | prompt tokens | output tokens | concurrency |
|---|---|---|---|---|
| W1 | 3, one after another | 128 | 128 | 1 |
| W2 | 64 | 64 to 512 | 64 to 128 | 64 |
| W3 | 64 that share 512 tokens and differ in 32 | 544 | 32 | 64 |
| W4 | 96 | as W2 | as W2 | 16 |
"""

import random
from dataclasses import dataclass
from typing import Literal

from bench.peers.checkpoint import VOCABULARY

WorkloadName = Literal["W1", "W2", "W3", "W4"]
NAMES: tuple[WorkloadName, ...] = ("W1", "W2", "W3", "W4")
_FIRST_TOKEN = 300
_DECODE_PROMPT = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, their output lengths, and the concurrency."""

    prompts: list[list[int]]
    max_tokens: list[int]
    concurrency: int

    def trial(self) -> "Workload":
        return Workload(self.prompts[:2], [8] * 2, min(self.concurrency, 2))


def workload(name: WorkloadName, seed: int) -> Workload:
    rng = random.Random(f"{name} {seed}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(count)]

    if name == "W1":
        return Workload([ids(128) for _ in range(3)], [128] * 3, 1)
    if name == "W3":
        shared = ids(512)
        return Workload([shared + ids(32) for _ in range(64)], [32] * 64, 64)
    count, concurrency = (64, 64) if name == "W2" else (96, 16)
    lengths = [rng.randint(64, 512) for _ in range(count)]
    return Workload([ids(length) for length in lengths], [rng.randint(64, 128) for _ in range(count)], concurrency)


def decode_workload(batch: int, max_tokens: int, seed: int) -> Workload:
    """Returns `batch` requests at once whose time is that of decode steps: their prompts are short."""
    rng = random.Random(f"decode {batch} {seed}")
    prompts = [[rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(_DECODE_PROMPT)] for _ in range(batch)]
    return Workload(prompts, [max_tokens] * batch, batch)
