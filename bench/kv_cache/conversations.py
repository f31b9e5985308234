"""Requests of conversations, for benchmarks of the prefix cache: of a trace, or generated.

Each turn's prompt starts with the turns before it. Equal blocks of a trace give equal tokens; the rest of a prompt is its own,
and so are the answers: a later turn finds the prompt of the turn before it, but not its answer.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bench.router.replay import BLOCK_TOKENS, Arrival, read_trace
from bench.simulate.traffic import jittered
from phalanx_api.cost import StepModel, attention_work

OWN_TOKENS = 1 << 31
"""Token ids from here on are those of one prompt; lower ones are those of blocks."""
BLOCK = 32
"""Tokens of a block of generated conversations."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Requests in order of arrival, and the tokens of their blocks."""

    arrivals: list[Arrival]
    block_tokens: int

    def prompt(self, number: int) -> list[int]:
        """Returns the tokens of a request's prompt."""
        blocks = self._blocks(self.arrivals[number])
        tokens = [block for block in blocks for _ in range(self.block_tokens)]
        return tokens + [OWN_TOKENS + number] * (self.arrivals[number].input_tokens - len(tokens))

    def working_set(self, page_size: int) -> int:
        """Returns the number of different full pages of all prompts, if pages divide blocks."""
        shared = {block for arrival in self.arrivals for block in self._blocks(arrival)}
        own = sum(
            arrival.input_tokens // page_size - len(self._blocks(arrival)) * self.block_tokens // page_size
            for arrival in self.arrivals
        )
        return len(shared) * self.block_tokens // page_size + own

    def _blocks(self, arrival: Arrival) -> tuple[int, ...]:
        """Returns the full blocks of a prompt; a partial one is identified by the whole prompt, so it is not shared."""
        return arrival.blocks[: arrival.input_tokens // self.block_tokens]


def read(path: Path, limit: int | None, share: float) -> Conversations:
    """Returns the first requests of a trace with lengths times `share`, each up to 3 s later, as Mooncake's times are those of
    batches. Raises ValueError for a trace without blocks.
    """
    arrivals = list(jittered(islice(read_trace(path), limit), random.Random(0)))
    if not any(arrival.blocks for arrival in arrivals):
        raise ValueError(f"{path} has no hash_ids, so its prompts share nothing")
    lengths = [[max(1, round(n * share)) for n in (arrival.input_tokens, arrival.output_tokens)] for arrival in arrivals]
    scaled = [
        replace(arrival, input_tokens=prompt, output_tokens=output)
        for arrival, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]
    return Conversations(scaled, max(1, round(BLOCK_TOKENS * share)))


def generate(count: int, seed: int = 0) -> Conversations:
    """Returns `count` conversations of 1 to 12 turns, 4 on average, which start at random.

    All start with the same 8 blocks, then a text of about 500 tokens. A turn adds about 200 tokens, its answer included. The
    pause between turns is a tenth of the whole time on average.
    """
    rng, whole_s = random.Random(seed), float(count)
    next_block, arrivals = 8, list[Arrival]()
    for _ in range(count):
        at_s, blocks, answer = rng.random() * whole_s, list(range(8)), 0
        added = rng.lognormvariate(6.0, 0.7)
        for _ in range(min(12, 1 + int(rng.expovariate(1 / 3)))):
            num_new = max(1, round((added + answer) / BLOCK))
            blocks += range(next_block, next_block + num_new)
            next_block += num_new
            answer = round(min(400, max(8, rng.lognormvariate(4.5, 0.7))))
            arrivals.append(Arrival(at_s, len(blocks) * BLOCK + rng.randrange(1, BLOCK), answer, tuple(blocks)))
            at_s += rng.expovariate(10 / whole_s)
            added = rng.lognormvariate(4.2, 0.7)
    return Conversations(sorted(arrivals, key=lambda arrival: arrival.at_s), BLOCK)


def alone_s(arrival: Arrival, model: StepModel, step_tokens: int) -> float:
    """Returns the seconds of a request's work without a cache: its prompt in steps of its own, its decodes in shared ones."""
    prompt, output = arrival.input_tokens, arrival.output_tokens
    num_steps = -(-prompt // step_tokens)
    prefill = num_steps * (model.fixed_s + model.prompt_s + model.context_s * prompt / 2)
    prefill += model.token_s * prompt + model.attention_s * attention_work(prompt)
    return prefill + output * (model.token_s + model.row_s + model.context_s * (prompt + output / 2))


def paced(arrivals: Sequence[Arrival], model: StepModel, step_tokens: int, load: float) -> list[Arrival]:
    """Returns the requests at such a rate that their work without a cache takes `load` of the time."""
    work_s = sum(alone_s(arrival, model, step_tokens) for arrival in arrivals)
    first, last = arrivals[0].at_s, arrivals[-1].at_s
    stretch = work_s / load / (last - first) if last > first else 0.0
    return [replace(arrival, at_s=(arrival.at_s - first) * stretch) for arrival in arrivals]
