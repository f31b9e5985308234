"""Prompts of the chaos benchmark's clients, and the tokens that each must get."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 120
"""Output tokens of each request."""
PREFIXES, ENDINGS = 8, 4
PREFIX_LENGTH, ENDING_LENGTH = 640, 40
"""Characters, which are tokens of the tiny model."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


@dataclass(frozen=True, slots=True)
class Question:
    """A request. `tokens`: the expected output; `None`: unknown."""

    prompt: str
    seed: int
    tokens: tuple[int, ...] | None = None


def own_question(client: int, number: int) -> Question:
    """Returns a short prompt that no other request has."""
    return Question(f"client {client} request {number}", 1000 * client + number)


def shared_prompts() -> list[str]:
    """Returns prompts of which each shares a long prefix with `ENDINGS` - 1 others."""
    rng = random.Random(0)
    prefixes = [_text(rng, PREFIX_LENGTH) for _ in range(PREFIXES)]
    return [prefix + _text(rng, ENDING_LENGTH) for prefix in prefixes for _ in range(ENDINGS)]


def answered(model: Path, flags: dict[str, Any]) -> list[Question]:
    """Returns the shared prompts with the output of an engine on this machine without prefix caching.

    flags: settings that change tokens.
    """
    from phalanx_runtime.llm import LLM  # the benchmark without references starts no engine
    from phalanx_runtime.offline.records import SamplingParams

    prompts = shared_prompts()
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    with LLM(str(model), enable_prefix_caching=False, **flags) as llm:
        outputs = llm.generate(prompts, params)
    return [
        Question(prompt, seed, tuple(output.outputs[0].token_ids))
        for seed, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def chosen(questions: Sequence[Question], client: int, number: int) -> Question:
    """Returns the question of a client's request: any, or `own_question` if there is none to choose from."""
    if not questions:
        return own_question(client, number)
    return questions[random.Random(1000 * client + number).randrange(len(questions))]


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(_LETTERS, k=length))
