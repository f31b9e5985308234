"""The last message of the user, as the response cache compares it with those of other requests."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.ids import random_id
from phalanx_frontend.images.parts import MixedContent
from phalanx_frontend.openai.embedding.inputs import POOLED
from phalanx_frontend.openai.prompt import ReadyPrompt
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, Message
from phalanx_frontend.openai.served_model import MAX_CHARACTERS, ServedModel
from phalanx_frontend.stream.question_vectors import POOLING, prepare
from phalanx_frontend.stream.response_cache import Question


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """Implements `phalanx_frontend.stream.response_cache.QuestionModel` for one request."""

    model: ServedModel
    request: wire.Request

    async def pooled(self, text: str, *, is_question: bool) -> wire.Request:
        """Returns the request for the embedding of a question, or of another text, of the same tenant and urgency.

        Raises ApiError. A question gets the prompt of `question_vectors`; the last tokens of a long one count.
        """
        embedding, longest = self.model.embedding(), self.model.assets.max_model_len
        tokens = await self.model.encode(prepare(text) if is_question else text, True, "messages")
        asked = self.request
        return wire.Request(
            id=random_id("cache-"),
            epoch=0,
            prompt=tokens[-longest:] if is_question else tokens[:longest],
            delivered=[],
            sampling=POOLED,
            priority=asked.priority,
            tenant=asked.tenant,
            cache_salt=asked.cache_salt,
            pooling=POOLING if is_question else embedding.pooling,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of an output."""
        return self.model.tokenizer.decode(list(tokens), skip_special_tokens=True)


def question_of(
    body: GenerationRequest, written: str | None, model: ServedModel, request: wire.Request, prompt: ReadyPrompt
) -> Question | None:
    """Returns the question of a request; null if others may not resemble it.

    `written`: the text of a prompt, which is the question of a request without messages. The last message must be the user's,
    the chat template must write it as it is, and the conversation must have no tools: calls and their results.
    """
    limit = body.max_tokens
    if isinstance(body, ChatRequest):
        text = None if _has_tools(body) else _last_message(body.messages)
        limit = body.max_completion_tokens or limit
    else:
        text = written
    if not text or not text.strip() or len(text) > MAX_CHARACTERS:
        return None
    context = _chat_context(body, text, prompt.rendered) if isinstance(body, ChatRequest) else _completion_context(body)
    if context is None:
        return None
    encoded = json.dumps(context, ensure_ascii=False).encode("utf-8", "surrogatepass")  # several times faster
    digest = hashlib.blake2b(encoded, digest_size=32).digest()
    requested = RequestedModel(model, request)
    return Question(text=text, context=digest, max_tokens=limit or 0, stop=tuple(body.stop), model=requested)


def _last_message(messages: Sequence[Message]) -> str | None:
    has_images = any(isinstance(message.content, MixedContent) for message in messages)
    content = messages[-1].content if messages[-1].role == "user" and not has_images else None
    return content if isinstance(content, str) else None


def _has_tools(body: ChatRequest) -> bool:
    return bool(body.tools) or any(message.tool_calls or message.tool_call_id for message in body.messages)


def _chat_context(body: ChatRequest, question: str, rendered: str) -> tuple[object, ...] | None:
    """The conversation as the template writes it, with what it adds, such as today's date, around the question.

    Null if the template changes the question. It may remove spaces around it.
    """
    before, found, after = rendered.rpartition(question.strip())
    return ("chat", bool(body.add_special_tokens), before, after) if found else None


def _completion_context(body: GenerationRequest) -> tuple[object, ...]:
    return ("completion", body.add_special_tokens is not False if isinstance(body, CompletionRequest) else True)
