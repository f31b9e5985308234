"""Requirements on every OpenAI server of Phalanx, checked with the real client, for any model and backend.

    @pytest.fixture(scope="module")
    def target() -> Iterator[Target]:
        yield Target("http://127.0.0.1:8000", "stories15m", has_chat=False)


    class TestMyServer(OpenAISuite):
        ...  # everything in the suite

`Target.is_exact`: equal requests give equal tokens (fp32); otherwise tests that compare texts are skipped. `Target.is_model`: a
real model with meaningful logprobs. A request for `long_tokens` must outlast the arrival of its first token. The URL must lead to
one server process: the tests of aborts read its /metrics.
"""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.frontend.openai_choices import ChoiceSuite
from tests.frontend.openai_embeddings import EmbeddingSuite
from tests.frontend.openai_target import (
    PROMPT,
    Target,
    complete,
    complete_streamed,
    metric,
    metric_reaches,
    raw_request,
)
from tests.frontend.openai_tokens import TokenSuite


class OpenAISuite(ChoiceSuite, TokenSuite, EmbeddingSuite):
    """Needs a `target` fixture."""

    async def test_models_lists_the_served_name_and_its_context(self, target: Target, client: AsyncOpenAI) -> None:
        cards = {card.id: card async for card in client.models.list()}
        assert cards[target.model].model_dump()["max_model_len"] > 0
        assert (await client.models.retrieve(target.model)).id == target.model

    @pytest.mark.parametrize("finish_after", [1, 2, 12])
    async def test_completion_has_max_tokens_tokens(self, target: Target, client: AsyncOpenAI, finish_after: int) -> None:
        ended = await complete(client, target, max_tokens=finish_after, extra_body={"ignore_eos": True})
        assert (ended.finish, ended.completion_tokens) == ("length", finish_after)
        assert ended.prompt_tokens > 0

    async def test_completion_defaults_to_sixteen_tokens(self, target: Target, client: AsyncOpenAI) -> None:
        answer = await client.completions.create(model=target.model, prompt=PROMPT, extra_body={"ignore_eos": True})
        assert answer.usage is not None and answer.usage.completion_tokens == 16
        assert answer.id.startswith("cmpl-")

    @pytest.mark.usefixtures("exact")
    @pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
    async def test_a_stream_is_the_whole_answer_in_pieces(self, target: Target, client: AsyncOpenAI, temperature: float) -> None:
        whole = await complete(client, target, temperature=temperature, seed=5)
        assert await complete_streamed(client, target, temperature=temperature, seed=5) == whole

    @pytest.mark.usefixtures("exact")
    async def test_a_seed_decides_the_text(self, target: Target, client: AsyncOpenAI) -> None:
        texts = [(await complete(client, target, temperature=1.0, seed=seed)).text for seed in (1, 2, 3, 4, 1, 2, 3, 4)]
        assert texts[:4] == texts[4:]
        assert len(set(texts)) > 1

    async def test_without_a_seed_answers_differ(self, target: Target, client: AsyncOpenAI) -> None:
        texts = {(await complete(client, target, temperature=1.5, extra_body={"ignore_eos": True})).text for _ in range(4)}
        assert len(texts) > 1

    @pytest.mark.usefixtures("exact")
    async def test_token_id_prompt_equals_its_text_prompt(self, target: Target, client: AsyncOpenAI) -> None:
        async with target.http() as http:
            tokenized = (await http.post("/tokenize", json={"model": target.model, "prompt": PROMPT})).json()
        assert tokenized["count"] == len(tokenized["tokens"])
        assert await complete(client, target, prompt=tokenized["tokens"]) == await complete(client, target)

    @pytest.mark.usefixtures("exact")
    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    async def test_a_stop_string_ends_the_text_before_itself(
        self, target: Target, client: AsyncOpenAI, is_streamed: bool
    ) -> None:
        free = await complete(client, target, max_tokens=24, extra_body={"ignore_eos": True})
        starts = [at for at in range(4, len(free.text) - 3) if free.text[at : at + 3].isascii()]
        assert starts, f"no three ASCII characters to stop at in {free.text!r}"
        stop = free.text[starts[0] : starts[0] + 3]
        run = complete_streamed if is_streamed else complete
        ended = await run(client, target, max_tokens=24, stop=[stop, "never in the text"], extra_body={"ignore_eos": True})
        assert ended.finish == "stop"
        assert ended.text == free.text[: free.text.index(stop)]
        assert ended.completion_tokens <= free.completion_tokens

    @pytest.mark.usefixtures("exact")
    async def test_concurrent_streams_do_not_mix(self, target: Target, client: AsyncOpenAI) -> None:
        def run(seed: int) -> Any:
            return complete_streamed(client, target, prompt=f"{PROMPT} {seed}", temperature=0.9, seed=seed)

        alone = [await run(seed) for seed in range(6)]
        together = await asyncio.gather(*(run(seed) for seed in range(6)))
        assert together == alone

    async def test_speech_is_refused_by_name(self, target: Target, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match=r"/v1/audio/transcriptions is not served: .*Whisper") as refused:
            await client.audio.transcriptions.create(model=target.model, file=("speech.wav", b"RIFF"))
        assert (refused.value.code, refused.value.type) == ("not_found", "invalid_request_error")

    async def test_a_stream_has_one_id_and_ends_with_done(self, target: Target) -> None:
        fields = {"model": target.model, "prompt": PROMPT, "max_tokens": 6, "stream": True}
        async with target.http() as http:
            answer = await http.post("/v1/completions", json=fields)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        ids = {json.loads(event)["id"] for event in events[:-1]}
        assert ids == {f"cmpl-{answer.headers['x-request-id']}"}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop": ""}, "stop"),
            ({"logprobs": 21}, "logprobs"),
            ({"n": 0}, "n"),
            ({"n": 129}, "n"),
            ({"n": 128, "prompt": ["x"] * 9}, "prompt"),
            ({"suffix": "x"}, "suffix"),
            ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
            ({"presence_penalty": 2.5}, "presence_penalty"),
            ({"frequency_penalty": -2.5}, "frequency_penalty"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"logit_bias": {"no": 1}}, "logit_bias"),
            ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
            ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
            ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
            ({"extra_body": {"priority": 0.5}}, "priority"),
            ({"extra_body": {"deadline_ms": 0}}, "deadline_ms"),
            ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
            ({"extra_body": {"guided_regex": "(a|b"}}, "guided_regex"),
            ({"extra_body": {"structured_outputs": {"json": {"type": "objekt"}}}}, "structured_outputs.json"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ["x", []]}, "prompt"),
        ],
        ids=lambda value: str(value),
    )
    async def test_a_field_that_cannot_be_obeyed_is_named(
        self, target: Target, client: AsyncOpenAI, fields: dict[str, Any], param: str
    ) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await complete(client, target, **fields)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"

    async def test_an_unknown_model_is_not_found(self, target: Target, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(model="no-such-model", prompt=PROMPT)
        assert caught.value.code == "model_not_found"

    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    async def test_prompt_longer_than_the_context_is_refused(
        self, target: Target, client: AsyncOpenAI, is_streamed: bool
    ) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=target.model, prompt=PROMPT, max_tokens=10**9, stream=is_streamed)
        assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize(
        ("method", "path", "content", "status", "code"),
        [
            ("POST", "/v1/completions", '{"prompt": "cut', 400, None),
            ("POST", "/v1/completions", "[1, 2]", 400, None),
            ("GET", "/v1/completions", "", 405, "method_not_allowed"),
            ("POST", "/v1/nothing", "{}", 404, "not_found"),
        ],
        ids=["cut JSON", "no object", "wrong method", "unknown path"],
    )
    async def test_every_error_has_openai_form(
        self, target: Target, method: str, path: str, content: str, status: int, code: str | None
    ) -> None:
        async with target.http() as http:
            answer = await http.request(method, path, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    async def test_closing_a_stream_aborts_its_request(self, target: Target, client: AsyncOpenAI) -> None:
        before = await metric(target, f"{target.metrics_prefix}_requests_finished_total", finished_reason="abort")
        stream = await client.completions.create(
            model=target.model, prompt=PROMPT, max_tokens=target.long_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        await metric_reaches(target, before + 1, f"{target.metrics_prefix}_requests_finished_total", finished_reason="abort")

    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    async def test_a_lost_client_aborts_its_request(self, target: Target, is_streamed: bool) -> None:
        before = await metric(target, f"{target.metrics_prefix}_requests_finished_total", finished_reason="abort")
        async with raw_request(target, {"max_tokens": target.long_tokens, "stream": is_streamed}):
            await metric_reaches(target, 1, f"{target.metrics_prefix}_requests_in_progress")
        await metric_reaches(target, before + 1, f"{target.metrics_prefix}_requests_finished_total", finished_reason="abort")

    async def test_server_reports_readiness(self, target: Target) -> None:
        async with target.http() as http:
            assert [(await http.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]

    @pytest.mark.usefixtures("chat")
    async def test_streamed_chat_equals_whole_chat(self, target: Target, client: AsyncOpenAI) -> None:
        fields: dict[str, Any] = {
            "model": target.model, "max_completion_tokens": 12, "temperature": 0,
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        }  # fmt: skip
        whole = await client.chat.completions.create(**fields)
        assert whole.id.startswith("chatcmpl-")
        assert whole.choices[0].message.role == "assistant"
        text, roles = "", []
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            text += chunk.choices[0].delta.content or ""
            roles.append(chunk.choices[0].delta.role)
        assert roles[0] == "assistant" and not any(roles[1:])
        if target.is_exact:
            assert text == whole.choices[0].message.content

    async def test_a_chat_without_a_template_is_refused_clearly(self, target: Target, client: AsyncOpenAI) -> None:
        if target.has_chat:
            pytest.skip("the model has a chat template")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=target.model, messages=[{"role": "user", "content": "hi"}])
        assert caught.value.code == "no_chat_template"
