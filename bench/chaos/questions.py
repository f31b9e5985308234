"""Questions of the chaos benchmark's clients, and the tokens that each may get."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOKENS = 120
"""Output tokens of each request."""
PREFIXES, ENDINGS, SPELLINGS = 8, 2, 2
"""Questions with one prefix; spellings of each differ by spaces alone."""
PREFIX_LENGTH, ENDING_LENGTH = 640, 40
"""Characters, which are tokens of the tiny model."""
SHORT = 48
"""Short prompts that clients ask again and again."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


@dataclass(frozen=True, slots=True)
class Question:
    """A request: of a chat if `context`, the system message, is not empty."""

    prompt: str
    seed: int
    answers: frozenset[tuple[int, ...]] = frozenset()
    """The right outputs: its own, and those of its other spellings, as a stored answer may be of one; empty: unknown."""
    context: str = ""

    @property
    def path(self) -> str:
        """Where it is sent."""
        return "/v1/chat/completions" if self.context else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        """Its prompt or messages, and its seed."""
        return {"seed": self.seed, **({"messages": self.messages} if self.context else {"prompt": self.prompt})}

    @property
    def messages(self) -> list[dict[str, str]]:
        """Of a chat."""
        return [{"role": "system", "content": self.context}, {"role": "user", "content": self.prompt}]


def own_question(client: int, number: int) -> Question:
    """Returns a short prompt that no other request has."""
    return Question(f"client {client} request {number}", 1000 * client + number)


def short_questions() -> list[Question]:
    """Returns short prompts without answers."""
    return [own_question(0, number) for number in range(SHORT)]


def shared_questions() -> list[Question]:
    """Returns chats, whose long system messages are shared, without answers. Spellings of one question have one seed."""
    rng = random.Random(0)
    contexts = [_text(rng, PREFIX_LENGTH) for _ in range(PREFIXES)]
    endings = [(context, _text(rng, ENDING_LENGTH)) for context in contexts for _ in range(ENDINGS)]
    return [
        Question(ending + " " * spaces, seed, context=context)
        for seed, (context, ending) in enumerate(endings)
        for spaces in range(SPELLINGS)
    ]


def answered(questions: Sequence[Question], model: Path, flags: dict[str, Any]) -> list[Question]:
    """Returns the questions with the outputs of an engine on this machine without prefix caching.

    flags: settings that change tokens.
    """
    from transformers import AutoTokenizer

    from phalanx_runtime.llm import LLM  # the benchmark without references starts no engine
    from phalanx_runtime.offline.records import SamplingParams

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    params = [SamplingParams(max_tokens=TOKENS, seed=question.seed, ignore_eos=True) for question in questions]
    prompts = [
        tokenizer.apply_chat_template(question.messages, add_generation_prompt=True, return_dict=False)
        if question.context
        else question.prompt
        for question in questions
    ]
    with LLM(str(model), enable_prefix_caching=False, **flags) as llm:
        outputs = [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    right = {
        seed: frozenset(output for question, output in zip(questions, outputs, strict=True) if question.seed == seed)
        for seed in {question.seed for question in questions}
    }
    return [replace(question, answers=right[question.seed]) for question in questions]


def chosen(questions: Sequence[Question], client: int, number: int) -> Question:
    """Returns the question of a client's request: any, or `own_question` if there is none to choose from."""
    if not questions:
        return own_question(client, number)
    return questions[random.Random(1000 * client + number).randrange(len(questions))]


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(_LETTERS, k=length))
