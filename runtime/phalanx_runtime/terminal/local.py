"""A model on ranks of this machine."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import BackendError, KeepAlive
from phalanx_frontend.errors import ApiError
from phalanx_frontend.ids import random_id, random_seed
from phalanx_frontend.openai.accept import backend_requests, make_reply
from phalanx_frontend.openai.answer_parts import part_parsers
from phalanx_frontend.openai.prompt import ReadyPrompt, chat_prompts, completion_prompts
from phalanx_frontend.openai.schemas import ChatRequest, CompletionRequest
from phalanx_frontend.openai.served_model import load_model
from phalanx_frontend.stream.reply import TEXT_ONLY
from phalanx_frontend.text.parts import Content, Part, PartParser, Reasoning
from phalanx_runtime.offline.group import GroupEnded, LocalGroup
from phalanx_runtime.settings import AnswerOptions, ServeSettings
from phalanx_runtime.terminal.conversation import ChatError, ChatMessage, TextPiece


class OfflineModel:
    """Implements `ChatModel`. Its ranks exit on `close` or with this process."""

    def __init__(self, settings: ServeSettings) -> None:
        """Returns when the model has loaded. Raises ModelError, or ChatError for files that cannot be used."""
        self._group = LocalGroup(settings)
        try:
            self._model = load_model(self._group.backend.assets())
        except ApiError as error:
            self._group.close()
            raise ChatError(error.message) from error

    def close(self) -> None:
        """Stops the ranks."""
        self._group.close()

    def stream(self, messages: list[ChatMessage], options: AnswerOptions) -> Generator[TextPiece]:
        """Yields the answer; closing the iterator aborts it. Raises ChatError."""
        pieces = self._pieces(messages, options)

        async def next_piece() -> TextPiece | None:
            return await anext(pieces, None)

        try:
            while (piece := self._group.run(next_piece())) is not None:
                yield piece
        except (ApiError, BackendError) as error:
            raise ChatError(error.message) from error
        except GroupEnded as error:
            raise ChatError(str(error)) from error
        finally:
            if not self._group.is_closed:
                self._group.run(_close(pieces))

    async def _pieces(self, messages: list[ChatMessage], options: AnswerOptions) -> AsyncGenerator[TextPiece, None]:
        body, prompts, parser = await self._prepared(messages, options)
        requests = await backend_requests(
            lambda prompt: random_seed(), body, Caller(request_id=""), self._model, prompts=prompts, id=random_id("req-")
        )
        reply = make_reply(body, self._model, requests[0], TEXT_ONLY)
        async with aclosing(self._group.backend.generate(requests[0])) as deltas:
            async for delta in deltas:
                if isinstance(delta, KeepAlive):
                    continue
                for piece in _split(parser, reply.feed(delta), is_end=reply.finish is not None):
                    yield piece
                if reply.finish is not None:
                    return

    async def _prepared(
        self, messages: list[ChatMessage], options: AnswerOptions
    ) -> tuple[ChatRequest | CompletionRequest, list[ReadyPrompt], PartParser | None]:
        """Returns body, prompt and parser. A model without a chat template continues a single message. Raises ApiError."""
        fields = {"temperature": options.temperature, "seed": options.seed, "max_tokens": options.max_tokens}
        if isinstance(self._model.template, str) and len(messages) == 1:
            completion = CompletionRequest.model_validate({"prompt": messages[0]["content"], **fields})
            prompts = await completion_prompts(completion, self._model)
            if options.max_tokens is None:
                room = max(1, self._model.assets.max_model_len - len(prompts[0].tokens))
                completion = completion.model_copy(update={"max_tokens": room})
            return completion, prompts, None
        chat = ChatRequest.model_validate({"messages": messages, **fields})
        prompts = await chat_prompts(chat, self._model)
        make_parser = part_parsers(chat, self._model)
        return chat, prompts, None if make_parser is None else make_parser(prompts[0].tokens)


def _split(parser: PartParser | None, text: str, is_end: bool) -> list[TextPiece]:
    parts: list[Part] = [Content(text)] if parser is None else parser.feed(text)
    if parser is not None and is_end:
        parts += parser.end()
    return [
        TextPiece(part.text, isinstance(part, Reasoning)) for part in parts if isinstance(part, Content | Reasoning) and part.text
    ]


async def _close(pieces: AsyncGenerator[TextPiece, None]) -> None:
    await pieces.aclose()
