"""The API server over scripts."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import Delta, KeepAlive
from tests.frontend.fakes import FakeBackend, Step, eos_id, text_script, tiny_assets, token_deltas, token_ids
from tests.frontend.openai_target import Target, raw_request
from tests.frontend.posting import PATIENCE_S, events, post, scripted
from tests.frontend.serving import served


async def test_each_request_gets_its_own_id_and_seed() -> None:
    backend = FakeBackend()
    for _ in range(3):
        await post(backend)
    assert len({request.id for request in backend.requests}) == 3
    assert len({request.sampling.seed for request in backend.requests}) == 3
    for request in backend.requests:
        assert request.id.startswith("cmpl-") and len(request.id) == len("cmpl-") + 32
        assert 0 <= request.sampling.seed < 2**63
        assert (request.epoch, request.delivered) == (0, [])


async def test_a_text_gets_special_tokens_and_ids_do_not() -> None:
    backend = FakeBackend()
    await post(backend, prompt="once")
    await post(backend, prompt="once", add_special_tokens=False)
    await post(backend, prompt=token_ids("once"))
    assert [request.prompt for request in backend.requests] == [[0, *token_ids("once")], token_ids("once"), token_ids("once")]


async def test_a_long_text_is_tokenised_like_a_short_one() -> None:
    backend = FakeBackend(assets=tiny_assets(max_model_len=10_000))
    await post(backend, prompt="a " * 4000)
    assert backend.requests[0].prompt == [0, *token_ids("a " * 4000)]


async def test_conversation_is_rendered_by_its_template() -> None:
    backend = FakeBackend()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "me"}]
    answer = await post(backend, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer.status_code == 200
    text = "<|system|>be brief\n<|user|>hi\n<|assistant|>"
    assert backend.requests[0].prompt == [0, *token_ids(text)]


async def test_template_receives_its_options() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].reasoning_content }}"
    backend = FakeBackend(assets=tiny_assets(chat_template=template))
    message = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    options = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1}
    await post(backend, "/v1/chat/completions", messages=[message], **options)
    assert backend.requests[0].prompt == token_ids("False low hm")


async def test_the_model_s_own_sampling_is_the_default() -> None:
    backend = FakeBackend(assets=tiny_assets(generation_config={"temperature": 0.5, "top_k": 7}))
    await post(backend)
    assert (backend.requests[0].sampling.temperature, backend.requests[0].sampling.top_k) == (0.5, 7)
    assert backend.requests[0].sampling.stop_token_ids == [eos_id()]


async def test_tokens_that_come_together_leave_together() -> None:
    tokens = token_ids("once upon a time")
    answer = await post(
        scripted(Delta(index=0, tokens=tokens[:2]), Delta(index=2, tokens=tokens[2:], finish="length")), stream=True
    )
    texts = [json.loads(event)["choices"][0]["text"] for event in events(answer)[:-1]]
    assert len(texts) == 2 and "".join(texts) == "once upon a time"


async def test_a_piece_that_waits_for_its_rest_sends_nothing() -> None:
    fox = token_ids("🦊")
    answer = await post(scripted(*token_deltas(fox, "length")), stream=True)
    assert len(fox) > 1
    assert [json.loads(event)["choices"][0]["text"] for event in events(answer)[:-1]] == ["🦊"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_counts_cached_and_generated_tokens(path: str) -> None:
    backend = FakeBackend(lambda request: token_deltas([*token_ids("ab"), eos_id()], "stop", cached_tokens=4))
    fields = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    whole = (await post(backend, path, **fields)).json()
    streamed = await post(backend, path, **fields, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events(streamed)[:-1]]
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == 3
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 3
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_a_kept_alive_stream_carries_comments() -> None:
    backend = scripted(
        KeepAlive(), Delta(index=0, tokens=token_ids("a")), KeepAlive(), Delta(index=1, tokens=token_ids("b"), finish="length")
    )
    streamed = await post(backend, stream=True)
    assert streamed.text.count(": keep-alive\n") == 2 and streamed.text.startswith(": keep-alive\n")
    assert (await post(backend)).json()["choices"][0]["text"] == "ab"


async def test_openai_client_ignores_comments_between_events() -> None:
    backend = scripted(
        Delta(index=0, tokens=token_ids("a")), KeepAlive(), KeepAlive(), Delta(index=1, tokens=token_ids("b"), finish="length")
    )
    async with served(create_app(backend)) as url, Target(url, "").client() as client:
        model = (await client.models.list()).data[0].id
        stream = await client.completions.create(model=model, prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b"]


async def test_a_stop_string_aborts_the_rest() -> None:
    backend = FakeBackend(text_script("once upon a time"))
    answer = (await post(backend, stop=" time", max_tokens=50)).json()
    assert answer["choices"][0] == {
        "index": 0, "text": "once upon a", "logprobs": None, "finish_reason": "stop", "stop_reason": " time"
    }  # fmt: skip
    assert backend.aborts.empty(), "the stop string was complete with the last token"
    assert (await post(backend, stop="upon", stream=True)).status_code == 200
    assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[1].id


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first token", "after it"])
async def test_a_client_that_leaves_aborts_its_request(is_streamed: bool, has_begun: bool) -> None:
    reached = asyncio.Event()

    def script(request: wire.Request) -> Sequence[Step]:
        reached.set()
        return [*([Delta(index=0, tokens=token_ids("a"))] if has_begun else []), asyncio.Event()]

    backend = FakeBackend(script)
    async with served(create_app(backend)) as url:
        async with raw_request(Target(url, "tiny"), {"stream": is_streamed}):
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
        assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[0].id


async def test_a_finished_request_is_not_aborted() -> None:
    backend = FakeBackend()
    await post(backend)
    await post(backend, stream=True)
    assert backend.aborts.empty()
