"""The conversations of a run: each follows from the seed and its number, so that any of them can be repeated."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench.frame.workload import words

Behaviour = Literal["reads", "reads slowly", "cancels"]
CONTEXT = 2048
"""Tokens of the longest conversation. Two of them do not fit into the page pool of a group."""
NUM_SYSTEM_PROMPTS = 6
SYSTEM_WORDS = 60
REPEATED = 0.3
"""Share of conversations that repeat the texts of an earlier one, whose pages are in host memory, on disk or lost by then."""
REACH = 60
"""How many conversations back it may be."""
THINK_S = 0.2
"""Longest pause before a turn."""
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 12, "maxItems": 12}
_SCHEMA = {"type": "object", "properties": {"a": _NUMBERS}, "required": ["a"], "additionalProperties": False}
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 1.0, "ignore_eos": True},
    "penalized": {"temperature": 0.8, "frequency_penalty": 0.2, "ignore_eos": True},
    "schema": {
        "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _SCHEMA}},
    },
    "regex": {"temperature": 1.0, "structured_outputs": {"regex": "([a-f]{7} ){10}"}},
}
KINDS = tuple(_KINDS)
_SHARES = (3, 3, 1, 1, 1)
_BEHAVIOURS: tuple[Behaviour, ...] = ("reads", "reads slowly", "cancels")
_BEHAVIOUR_SHARES = (8, 1, 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of a client."""

    text: str
    kind: str
    fields: dict[str, Any]
    """Of the request, without messages and model."""
    behaviour: Behaviour
    cancel_after: int
    """Tokens after which a client that cancels disconnects."""
    pause_s: float
    """Before the client asks."""
    first_router: int
    """The one that the client asks first: 0 or 1."""


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int
    system: str
    turns: tuple[Turn, ...]


Conversations = Callable[[int], Conversation]
"""Returns a conversation by number."""


def conversation(seed: int, number: int) -> Conversation:
    """Returns a conversation of one to five turns. All with the same system prompt share its pages."""
    rng = random.Random(f"{seed} {number}")
    source = number
    if number and rng.random() < REPEATED:
        source = rng.randrange(max(0, number - REACH), number)
    texts = random.Random(f"{seed} texts {source}")
    system = words(random.Random(f"{seed} system {texts.randrange(NUM_SYSTEM_PROMPTS)}"), SYSTEM_WORDS)
    num_turns = min(5, 1 + int(texts.expovariate(0.5)))
    return Conversation(number, system, tuple(_turn(texts, rng) for _ in range(num_turns)))


def _turn(texts: random.Random, rng: random.Random) -> Turn:
    """texts: equal in conversations that repeat one another, so that their prompts are too."""
    max_tokens = texts.randrange(60, 500)
    return drawn_turn(words(texts, texts.randrange(5, 40)), max_tokens, texts, rng, rng.uniform(0, THINK_S))


def drawn_turn(text: str, max_tokens: int, texts: random.Random, rng: random.Random, pause_s: float) -> Turn:
    """Returns a turn whose kind of sampling is drawn from `texts`, and what its client does from `rng`."""
    kind = texts.choices(KINDS, _SHARES)[0]
    return Turn(
        text=text,
        kind=kind,
        fields={**_KINDS[kind], "max_tokens": max_tokens, "seed": texts.randrange(1 << 31)},
        behaviour=rng.choices(_BEHAVIOURS, _BEHAVIOUR_SHARES)[0],
        cancel_after=rng.randrange(1, max_tokens),
        pause_s=pause_s,
        first_router=rng.randrange(2),
    )


def messages(talk: Conversation, answers: list[str]) -> list[dict[str, str]]:
    """Returns the messages up to the next turn. answers: those of the turns before it."""
    found = [{"role": "system", "content": talk.system}]
    for turn, answer in zip(talk.turns, answers, strict=False):
        found += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
    return [*found, {"role": "user", "content": talk.turns[len(answers)].text}]


def num_tokens(prompt: list[dict[str, str]]) -> int:
    """Returns how many tokens messages have at most: a byte is one, and the template adds a few to each message."""
    return sum(len(message["content"].encode()) + 4 for message in prompt)
