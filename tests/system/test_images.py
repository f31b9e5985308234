"""Images through a router and a runtime, with unchanged clients. Real processes, a tiny model."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from bench.frame.programs import running
from tests.runtime.tiny_vision import data_url, picture, save_tiny_vision
from tests.system.runtimes import router_flags, runtime

pytestmark = pytest.mark.system
FIRST, SECOND = data_url(picture(1)), data_url(picture(2))
PAGE = 8
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("images")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny_vision(folder / "tiny", "idefics3")
    (folder / "token").write_text("a-service-token")
    with (
        runtime("one", model, "--page-size", str(PAGE)) as one,
        running("router", "phalanx_router", router_flags([one], folder / "token"), folder) as router,
    ):
        yield router.base_url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def chat(client: AsyncOpenAI, image: str, **fields: Any) -> Any:
    content: Any = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is it"}]
    messages: Any = [{"role": "user", "content": content}]
    return await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0, **fields)


async def test_the_same_image_is_cached_and_another_is_not(client: AsyncOpenAI) -> None:
    first, again, other = [await chat(client, image, logprobs=True) for image in (FIRST, FIRST, SECOND)]
    assert first.choices[0].message.content == again.choices[0].message.content
    values = [answer.choices[0].logprobs.content[0].logprob for answer in (first, again, other)]
    assert abs(values[0] - values[1]) < 1e-3 < abs(values[0] - values[2])
    assert first.usage.prompt_tokens == again.usage.prompt_tokens > 5 * 4, "five tiles of four tokens"
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, other)]
    assert cached[0] == 0 and cached[1] >= 5 * 4 and cached[2] < PAGE


async def test_streams_with_images_have_the_same_text(client: AsyncOpenAI) -> None:
    stream = await chat(client, FIRST, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == (await chat(client, FIRST)).choices[0].message.content


async def test_responses_and_messages_take_images(url: str, client: AsyncOpenAI) -> None:
    expected = (await chat(client, FIRST)).choices[0].message.content
    content: Any = [{"type": "input_image", "image_url": FIRST}, {"type": "input_text", "text": "what is it"}]
    question: Any = [{"role": "user", "content": content}]
    response = await client.responses.create(model="tiny", input=question, max_output_tokens=8, temperature=0)
    assert response.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": FIRST.partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what is it"}]
    asked: Any = [{"role": "user", "content": blocks}]
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic:
        message: Any = await anthropic.messages.create(model="tiny", max_tokens=8, messages=asked, extra_body=GREEDY)
    assert "".join(block.text for block in message.content) == expected


async def test_bad_images_are_refused(client: AsyncOpenAI) -> None:
    for image in ("data:image/png;base64,AAAA", "https://images.example/a.png", "https://127.0.0.1/a.png"):
        with pytest.raises(BadRequestError):
            await chat(client, image)
    assert (await chat(client, FIRST)).choices, "the service still answers"
