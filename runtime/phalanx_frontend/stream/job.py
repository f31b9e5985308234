"""One accepted request of the OpenAI routes: the choices to generate, and how to write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx_api import wire
from phalanx_frontend.metrics import RequestMeter
from phalanx_frontend.stream.formats import AnswerFormat, ChoiceFormat
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import Past


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice: what the backend is asked, its answer so far, how that is written and what is measured of it."""

    request: wire.Request
    reply: Reply
    format: ChoiceFormat
    meter: RequestMeter
    past: Past | None = None
    """What the client has of it, when it is resumed."""

    @property
    def have(self) -> int:
        """How many of its tokens the client had before."""
        return 0 if self.past is None else self.past.have


@dataclass(frozen=True, slots=True)
class Job:
    """All choices of one answer: those of the first prompt, then those of the next. Each prompt has `per_prompt` of them.

    `stream`: the name in the ids of its events.
    """

    id: str
    stream: str
    choices: Sequence[Choice]
    per_prompt: int
    format: AnswerFormat
    is_streamed: bool
    has_usage: bool
    has_running_usage: bool

    def usage(self) -> dict[str, Any]:
        """Token counts: each prompt once, whatever its number of choices, and the output of all choices."""
        firsts = self.choices[:: self.per_prompt]
        prompt_tokens = sum(len(choice.request.prompt) for choice in firsts)
        completion_tokens = sum(choice.reply.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.reply.cached_tokens for choice in firsts)},
        }
