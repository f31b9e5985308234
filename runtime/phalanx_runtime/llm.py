"""The engine without a server: `LLM(model).generate(prompts, params)`, in the words of vLLM's class of that name.

The ranks are processes of their own, as in a pod, and requests go through the same scheduler, prompts and texts through the same
door as those over HTTP: equal parameters and seeds give equal tokens.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from phalanx_api import wire
from phalanx_api.engine_config import DType
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.backend import BackendError, KeepAlive
from phalanx_frontend.errors import ApiError
from phalanx_frontend.ids import draw_id, draw_seed
from phalanx_frontend.limits import Limits
from phalanx_frontend.openai.accept import backend_requests, make_reply
from phalanx_frontend.openai.prompt import completion_prompts
from phalanx_frontend.openai.sampling import check_fields
from phalanx_frontend.openai.schemas import CompletionRequest
from phalanx_frontend.openai.served_model import load_model
from phalanx_frontend.stream.reply import TEXT_ONLY, Reply
from phalanx_runtime.offline.group import GroupEnded, LocalGroup
from phalanx_runtime.offline.outputs import CompletionOutput, RequestOutput, prompt_token_logprobs, token_logprobs
from phalanx_runtime.offline.params import SamplingParams, make_body, make_settings

Prompt = str | Sequence[int]
"""A text, or token ids."""
AT_ONCE = 512
"""Requests in the engine at once. More would pass the bound of its queue, fewer could leave rows of a step empty."""

FIRST_WAIT_S, LAST_WAIT_S = 0.05, 1.0
"""Between two tries of a request that found the engine's queue full; doubled from one to the next."""


class GenerationError(RuntimeError):
    """The engine lost the requests: a rank ended. It comes back by itself, so `generate` may be called again."""


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One sequence as it comes."""

    request: wire.Request
    reply: Reply
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    prompt_details: list[wire.TokenDetail] = field(default_factory=list)


class LLM:
    """A model on ranks of its own. Also a context manager: at its end, and at that of this process, the ranks are gone."""

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
        """Returns when the model is loaded. `flags` are those of `phalanx-runtime serve`, with underscores.

        Raises ValueError for a flag that cannot be used, ModelError when the model cannot be loaded.
        """
        own = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "dtype": dtype,
            "max_model_len": max_model_len,
        }
        settings = make_settings(model, {**own, **flags}, os.environ)
        self._room = settings.engine.max_num_seqs + settings.engine.max_num_queued_reqs
        self._group = LocalGroup(settings)
        try:
            self._model = load_model(self._group.backend.assets())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The outputs for each prompt, in their order. `sampling_params`: one for all, or one for each.

        Raises ValueError, before anything is computed, for a prompt or parameter that cannot be served; GenerationError.
        """
        each = _list_of(prompts)
        params = sampling_params or SamplingParams()
        several = [params] * len(each) if isinstance(params, SamplingParams) else list(params)
        if len(several) != len(each):
            raise ValueError(f"{len(several)} sampling_params for {len(each)} prompts; expected one, or one for each")
        bodies = [make_body(prompt, one) for prompt, one in zip(each, several, strict=True)]
        try:
            return self._group.run(self._answer(bodies, several))
        except ApiError as error:
            named = error.param is None or error.param in error.message
            raise ValueError(error.message if named else f"{error.param}: {error.message}") from error
        except BackendError as error:
            if error.status < 500:
                raise ValueError(error.message) from error
            raise GenerationError(error.message) from error
        except GroupEnded as error:
            raise GenerationError(str(error)) from error

    def close(self) -> None:
        """Ends the ranks. May be called again."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _answer(self, bodies: list[CompletionRequest], params: list[SamplingParams]) -> list[RequestOutput]:
        """All requests checked first, then computed side by side."""
        prepared = [await self._choices(body, one) for body, one in zip(bodies, params, strict=True)]
        room = asyncio.Semaphore(min(AT_ONCE, self._room))
        tasks = [asyncio.create_task(self._run(choice, room)) for choices in prepared for choice in choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [self._output(body, choices) for body, choices in zip(bodies, prepared, strict=True)]

    async def _choices(self, body: CompletionRequest, params: SamplingParams) -> list[_Choice]:
        """The sequences of one prompt. Raises ApiError."""
        check_fields(body, Limits())
        prompts = await completion_prompts(body, self._model)
        if params.max_tokens is None:
            room = self._model.assets.max_model_len - len(prompts[0])
            body = body.model_copy(update={"max_tokens": max(room, 1)})
        requests = await backend_requests(
            lambda prompt: draw_seed(), body, caller=Caller(request_id=""), model=self._model, prompts=prompts, id=draw_id("req-")
        )
        return [_Choice(request=request, reply=make_reply(body, self._model, request, TEXT_ONLY)) for request in requests]

    async def _run(self, choice: _Choice, room: asyncio.Semaphore) -> None:
        """Computes one sequence to its end; a full queue is waited for. Raises BackendError."""
        wait_s = FIRST_WAIT_S
        async with room:
            while True:
                try:
                    return await self._read(choice)
                except BackendError as error:
                    if error.status != 429:
                        raise
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_WAIT_S)

    async def _read(self, choice: _Choice) -> None:
        """Reads one sequence to its end. Raises BackendError."""
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
        prompt, written = first.request.prompt, body.prompt[0]
        asked = first.request.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=first.request.id,
            prompt=written if isinstance(written, str) else None,
            prompt_token_ids=prompt,
            prompt_logprobs=prompt_token_logprobs(tokenizer, prompt, first.prompt_details) if asked else None,
            outputs=[self._completion(index, choice) for index, choice in enumerate(choices)],
            num_cached_tokens=first.reply.cached_tokens,
        )

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        """One output. Tokens after the one that completed a stop string are none of it."""
        tokens = choice.tokens[: choice.reply.completion_tokens]
        details = [detail for detail in choice.details[: len(tokens)] if detail is not None]
        asked = choice.request.sampling.logprobs is not None
        assert choice.reply.finish is not None, "the last delta of a stream carries its end"
        return CompletionOutput(
            index=index,
            text=choice.text,
            token_ids=tokens,
            cumulative_logprob=sum(detail.logprob for detail in details) if asked else None,
            logprobs=[token_logprobs(self._model.tokenizer, *one) for one in zip(tokens, details, strict=True)]
            if asked
            else None,
            finish_reason=choice.reply.finish,
            stop_reason=choice.reply.stop_reason,
        )


def _list_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Each prompt: a text or a list of ids alone is one."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    several = [item for item in prompts if not isinstance(item, int)]
    if ids and several:
        raise ValueError("prompts has token ids beside texts or lists; expected the ids of one prompt, or several prompts")
    return [ids] if ids else several
