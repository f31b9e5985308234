"""The last message of the user, as the response cache compares it with those of other requests."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_frontend.ids import random_id
from phalanx_frontend.images.parts import MixedContent
from phalanx_frontend.openai.embedding.inputs import POOLED
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, Message
from phalanx_frontend.openai.served_model import MAX_CHARACTERS, ServedModel
from phalanx_frontend.stream.question_vectors import AFTER, BEFORE, POOLING
from phalanx_frontend.stream.response_cache import Question
from phalanx_frontend.text.cuts import SharedTokens

MESSAGE_FIELDS = tuple(Message.model_fields)


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """Implements `phalanx_frontend.stream.response_cache.QuestionModel` for one request."""

    model: ServedModel
    request: wire.Request
    shared: SharedTokens | None = None
    """Of the question, as its prompt has them."""

    async def pooled(self, text: str, *, is_question: bool) -> wire.Request:
        """Returns the request for the embedding of a question, or of another text, of the same tenant and urgency.

        Raises ApiError. A question gets the prompt of `question_vectors`; the last tokens of a long one count.
        """
        embedding, longest = self.model.embedding(), self.model.assets.max_model_len
        tokens = await self._tokens(text, is_question)
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

    async def _tokens(self, text: str, is_question: bool) -> list[int]:
        if is_question and self.shared is not None:
            return await self.model.encode_shared(BEFORE, text, AFTER, self.shared, "messages")
        return await self.model.encode(BEFORE + text + AFTER if is_question else text, True, "messages")

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of an output."""
        return self.model.tokenizer.decode(list(tokens), skip_special_tokens=True)


def question_of(
    body: GenerationRequest, written: str | None, model: ServedModel, request: wire.Request, shared: SharedTokens | None = None
) -> Question | None:
    """Returns the question of a request; null if others may not resemble it.

    `written`: the text of a prompt, which is the question of a request without messages; `shared`: tokens of the question, from
    its prompt. The last message must be the user's, and the conversation must have no tools: calls and their results.
    """
    text = _last_message(body.messages) if isinstance(body, ChatRequest) else written
    if not text or not text.strip() or len(text) > MAX_CHARACTERS or (isinstance(body, ChatRequest) and _has_tools(body)):
        return None
    context = _chat_context(body) if isinstance(body, ChatRequest) else _completion_context(body)
    limit = (body.max_completion_tokens if isinstance(body, ChatRequest) else None) or body.max_tokens
    encoded = json.dumps(context, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")  # several times faster
    digest = hashlib.blake2b(encoded, digest_size=32).digest()
    requested = RequestedModel(model, request, shared)
    return Question(text=text, context=digest, max_tokens=limit or 0, stop=tuple(body.stop), model=requested)


def _last_message(messages: Sequence[Message]) -> str | None:
    has_images = any(isinstance(message.content, MixedContent) for message in messages)
    content = messages[-1].content if messages[-1].role == "user" and not has_images else None
    return content if isinstance(content, str) else None


def _has_tools(body: ChatRequest) -> bool:
    return bool(body.tools) or any(message.tool_calls or message.tool_call_id for message in body.messages)


def _chat_context(body: ChatRequest) -> tuple[object, ...]:
    """All that a rendered conversation depends on, without the last message's text."""
    earlier = [_shown(message) for message in body.messages[:-1]]
    last = _shown(body.messages[-1].model_copy(update={"content": None}))
    options = (body.add_generation_prompt, body.add_special_tokens, body.reasoning_effort, body.chat_template_kwargs)
    return ("chat", earlier, last, *options, body.tool_choice if isinstance(body.tool_choice, str) else None)


def _shown(message: Message) -> list[object]:
    """What reaches the template of a message without tool calls."""
    return [getattr(message, name) for name in MESSAGE_FIELDS]


def _completion_context(body: GenerationRequest) -> tuple[object, ...]:
    return ("completion", body.add_special_tokens is not False if isinstance(body, CompletionRequest) else True)
