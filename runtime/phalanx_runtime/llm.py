"""Offline engine with vLLM's interface: `LLM(model).generate(prompts, params)`, `LLM(model).embed(prompts)`.

Ranks are separate processes. Equal parameters and seeds give equal tokens as over HTTP.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from phalanx_api import wire
from phalanx_api.engine_config import DType
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import BackendError, KeepAlive
from phalanx_frontend.errors import ApiError
from phalanx_frontend.ids import random_id, random_seed
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.accept import backend_requests, make_reply
from phalanx_frontend.openai.embedding.embeddings import embed_one, shaped
from phalanx_frontend.openai.embedding.inputs import pooled_requests, tokenized_inputs
from phalanx_frontend.openai.prompt import completion_prompts
from phalanx_frontend.openai.sampling import check_fields
from phalanx_frontend.openai.schemas import CompletionRequest, EmbeddingRequest
from phalanx_frontend.openai.served_model import load_model
from phalanx_frontend.stream.reply import TEXT_ONLY, Reply
from phalanx_runtime.offline.group import GroupEnded, LocalGroup
from phalanx_runtime.offline.records import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprobs,
    RequestOutput,
    SamplingParams,
    make_body,
    make_settings,
    prompt_token_logprobs,
    token_logprobs,
)

T = TypeVar("T")
Prompt = str | Sequence[int]
"""A text, or token ids."""
MAX_CONCURRENT = 512
"""Maximum number of requests in the engine."""

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Backoff while the engine's queue is full."""


class GenerationError(RuntimeError):
    """A rank exited and the requests are lost. The engine restarts: call `generate` again."""


@dataclass(slots=True, kw_only=True)
class _Choice:
    request: wire.Request
    reply: Reply
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    prompt_details: list[wire.TokenDetail] = field(default_factory=list)


class LLM:
    """A model on local ranks, which exit on `close` or with this process. Also a context manager."""

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: DType = "auto",
        max_model_len: int | None = None,
        **flags: object,
    ) -> None:
        """Loads the model. `flags`: those of `phalanx-runtime serve`, with underscores.

        Raises ValueError for an invalid flag, ModelError when the model cannot be loaded.
        """
        named = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "dtype": dtype,
            "max_model_len": max_model_len,
        }
        settings = make_settings(model, {**named, **flags}, os.environ)
        self._capacity = settings.engine.max_num_seqs + settings.engine.max_num_queued_reqs
        self._group = LocalGroup(settings)
        try:
            self._model = load_model(self._group.backend.assets())
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> LocalGroup:
        """The ranks and their backend."""
        return self._group

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapters: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Returns the outputs of each prompt in order. `sampling_params`: one for all prompts, or one per prompt.

        `adapters`: the name of each prompt's adapter among `lora_modules`, or none.
        Raises ValueError for an invalid prompt or parameter before it computes any; GenerationError.
        """
        prompt_list = _prompt_list(prompts)
        params = sampling_params or SamplingParams()
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else list(params)
        if len(params_list) != len(prompt_list):
            expected = "expected one, or one per prompt"
            raise ValueError(f"{len(params_list)} sampling_params for {len(prompt_list)} prompts; {expected}")
        names = [None] * len(prompt_list) if adapters is None else list(adapters)
        if len(names) != len(prompt_list):
            raise ValueError(f"{len(names)} adapters for {len(prompt_list)} prompts; expected one per prompt")
        bodies = [make_body(prompt, params) for prompt, params in zip(prompt_list, params_list, strict=True)]
        bodies = [body.model_copy(update={"model": name}) for body, name in zip(bodies, names, strict=True)]
        return self._call(self._generate(bodies, params_list))

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each prompt in order, as /v1/embeddings.

        Raises ValueError for an invalid prompt, or a model without embeddings, before it computes any; GenerationError.
        """
        prompt_list = _prompt_list(prompts)
        return self._call(self._embed(prompt_list)) if prompt_list else []

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the group's event loop and converts its errors."""
        try:
            return self._group.run(work)
        except ApiError as error:
            is_named = error.param is None or error.param in error.message
            raise ValueError(error.message if is_named else f"{error.param}: {error.message}") from error
        except BackendError as error:
            if error.status < 500:
                raise ValueError(error.message) from error
            raise GenerationError(error.message) from error
        except GroupEnded as error:
            raise GenerationError(str(error)) from error

    def close(self) -> None:
        """Stops the ranks. Idempotent."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _generate(self, bodies: list[CompletionRequest], params: list[SamplingParams]) -> list[RequestOutput]:
        choices_list = [await self._choices(body, one) for body, one in zip(bodies, params, strict=True)]
        await self._run_all([partial(self._read, choice) for choices in choices_list for choice in choices])
        return [self._output(body, choices) for body, choices in zip(bodies, choices_list, strict=True)]

    async def _embed(self, prompts: list[Prompt]) -> list[EmbeddingRequestOutput]:
        embedding = self._model.embedding()
        body = EmbeddingRequest(input=[prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts])
        inputs = await tokenized_inputs(body, body.input, self._model)
        requests = pooled_requests(random_id("embd-"), inputs, embedding.pooling, body, Caller(request_id=""))
        deltas = await self._run_all([partial(embed_one, self._group.backend, request) for request in requests])
        return [
            EmbeddingRequestOutput(
                request_id=request.id,
                prompt_token_ids=request.prompt,
                outputs=EmbeddingOutput(shaped(delta.vector, embedding.size, embedding.is_normalised).tolist()),
                num_cached_tokens=delta.cached_tokens,
            )
            for request, delta in zip(requests, deltas, strict=True)
        ]

    async def _run_all(self, reads: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Runs all within the engine's capacity. The first failure ends them. Raises BackendError."""
        slots = asyncio.Semaphore(min(MAX_CONCURRENT, self._capacity))
        tasks = [asyncio.create_task(_retried(read, slots)) for read in reads]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choices(self, body: CompletionRequest, params: SamplingParams) -> list[_Choice]:
        """Creates the requests of one prompt. Raises ApiError."""
        check_fields(body, Limits())
        caller, served = Caller(request_id=""), self._group.backend.assets()
        model = replace(self._model, assets=served)
        adapter = model.adapter(model.name_for(body.model, caller))
        prompts = await completion_prompts(body, self._model)
        if params.max_tokens is None:
            remaining = self._model.assets.max_model_len - len(prompts[0].tokens)
            body = body.model_copy(update={"max_tokens": max(remaining, 1)})
        requests = await backend_requests(
            lambda prompt: random_seed(),
            body,
            caller=caller,
            model=self._model,
            prompts=prompts,
            id=random_id("req-"),
            adapter=adapter,
        )
        return [_Choice(request=request, reply=make_reply(body, self._model, request, TEXT_ONLY)) for request in requests]

    async def _read(self, choice: _Choice) -> None:
        async with aclosing(self._group.backend.generate(choice.request)) as deltas:
            async for delta in deltas:
                if isinstance(delta, KeepAlive):
                    continue
                choice.text += choice.reply.feed(delta)
                choice.tokens += delta.tokens
                choice.details += delta.details
                choice.prompt_details += delta.prompt_details
                if choice.reply.finish is not None:
                    return

    def _output(self, body: CompletionRequest, choices: list[_Choice]) -> RequestOutput:
        first, tokenizer = choices[0], self._model.tokenizer
        prompt, text = first.request.prompt, body.prompt[0]
        has_logprobs = first.request.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=first.request.id,
            prompt=text if isinstance(text, str) else None,
            prompt_token_ids=prompt,
            prompt_logprobs=prompt_token_logprobs(tokenizer, prompt, first.prompt_details) if has_logprobs else None,
            outputs=[self._completion(index, choice) for index, choice in enumerate(choices)],
            num_cached_tokens=first.reply.cached_tokens,
        )

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        """Excludes tokens after a stop string."""
        tokens = choice.tokens[: choice.reply.completion_tokens]
        details = [detail for detail in choice.details[: len(tokens)] if detail is not None]
        has_logprobs = choice.request.sampling.logprobs is not None
        assert choice.reply.finish is not None, "the last delta of a stream has a finish reason"
        return CompletionOutput(
            index=index,
            text=choice.text,
            token_ids=tokens,
            cumulative_logprob=sum(detail.logprob for detail in details) if has_logprobs else None,
            logprobs=self._logprobs(tokens, details) if has_logprobs else None,
            finish_reason=choice.reply.finish,
            stop_reason=choice.reply.stop_reason,
        )

    def _logprobs(self, tokens: list[int], details: list[wire.TokenDetail]) -> list[Logprobs]:
        return [token_logprobs(self._model.tokenizer, token, detail) for token, detail in zip(tokens, details, strict=True)]


async def _retried(read: Callable[[], Awaitable[T]], slots: asyncio.Semaphore) -> T:
    """Retries while the queue is full. Raises BackendError."""
    backoff_s = MIN_BACKOFF_S
    async with slots:
        while True:
            try:
                return await read()
            except BackendError as error:
                if error.status != 429:
                    raise
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    token_ids = [item for item in prompts if isinstance(item, int)]
    many = [item for item in prompts if not isinstance(item, int)]
    if token_ids and many:
        raise ValueError("prompts mixes token ids with texts or lists; expected the ids of one prompt, or several prompts")
    return [token_ids] if token_ids else many
