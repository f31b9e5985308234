"""Several choices of one request: n of a prompt, and several prompts. Part of the OpenAI suite."""

from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import CompletionUsage

from phalanx_api.wire.router import choice_seed
from tests.frontend.openai_target import PROMPT, SuiteFixtures, Target, complete

PROMPTS = [PROMPT, f"{PROMPT}, there was", "The"]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Usage without cached tokens, which depend on the group."""

    prompt_tokens: int
    completion_tokens: int


def usage_of(usage: CompletionUsage | None) -> TokenUsage:
    """Returns the usage of an answer."""
    assert usage is not None
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens)


async def texts(client: AsyncOpenAI, target: Target, **fields: Any) -> tuple[dict[int, str], TokenUsage]:
    """Returns texts by index of the choice, and the usage."""
    fields = {"model": target.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    answer = await client.completions.create(**fields)
    assert all(choice.finish_reason for choice in answer.choices)
    return {choice.index: choice.text for choice in answer.choices}, usage_of(answer.usage)


async def streamed_texts(client: AsyncOpenAI, target: Target, **fields: Any) -> tuple[dict[int, str], TokenUsage]:
    """Returns the same, joined from a stream."""
    fields = {"model": target.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    found: dict[int, str] = {}
    ended: set[int] = set()
    usage = None
    async for chunk in await client.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
        for choice in chunk.choices:
            assert choice.index not in ended, "a chunk came after the one with the reason"
            found[choice.index] = found.get(choice.index, "") + choice.text
            ended |= {choice.index} if choice.finish_reason else set()
        usage = chunk.usage
    assert ended == set(found)
    return found, usage_of(usage)


class ChoiceSuite(SuiteFixtures):
    """Requests with several choices."""

    @pytest.mark.usefixtures("exact")
    async def test_choice_i_of_n_equals_its_seed_alone(self, target: Target, client: AsyncOpenAI) -> None:
        found, usage = await texts(client, target, n=3, temperature=1.2, seed=5)
        alone = [
            await complete(client, target, max_tokens=8, temperature=1.2, seed=choice_seed(5, choice)) for choice in range(3)
        ]
        assert found == {index: ended.text for index, ended in enumerate(alone)}
        assert len(set(found.values())) > 1
        assert usage.prompt_tokens == alone[0].prompt_tokens
        assert usage.completion_tokens == sum(ended.completion_tokens for ended in alone)

    @pytest.mark.usefixtures("exact")
    async def test_greedy_choices_are_equal(self, target: Target, client: AsyncOpenAI) -> None:
        found, _ = await texts(client, target, n=4)
        assert len(found) == 4 and len(set(found.values())) == 1

    async def test_choices_without_a_seed_differ(self, target: Target, client: AsyncOpenAI) -> None:
        found, _ = await texts(client, target, n=4, temperature=1.5, extra_body={"ignore_eos": True})
        assert len(set(found.values())) > 1

    @pytest.mark.usefixtures("exact")
    async def test_several_prompts_are_answered_as_if_each_came_alone(self, target: Target, client: AsyncOpenAI) -> None:
        found, usage = await texts(client, target, prompt=PROMPTS, temperature=0.9, seed=7)
        alone = [await complete(client, target, prompt=prompt, max_tokens=8, temperature=0.9, seed=7) for prompt in PROMPTS]
        assert found == {index: ended.text for index, ended in enumerate(alone)}
        assert usage.prompt_tokens == sum(ended.prompt_tokens for ended in alone)

    @pytest.mark.usefixtures("exact")
    async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(self, target: Target, client: AsyncOpenAI) -> None:
        found, _ = await texts(client, target, prompt=PROMPTS, n=2, temperature=0.9, seed=7)
        for index, prompt in enumerate(PROMPTS):
            expected, _ = await texts(client, target, prompt=prompt, n=2, temperature=0.9, seed=7)
            assert {0: found[2 * index], 1: found[2 * index + 1]} == expected

    @pytest.mark.usefixtures("exact")
    async def test_prompts_may_be_lists_of_token_ids(self, target: Target, client: AsyncOpenAI) -> None:
        async with target.http() as http:
            token_ids = [(await http.post("/tokenize", json={"prompt": prompt})).json()["tokens"] for prompt in PROMPTS]
        assert await texts(client, target, prompt=token_ids) == await texts(client, target, prompt=PROMPTS)

    @pytest.mark.usefixtures("exact")
    async def test_choices_stream_side_by_side(self, target: Target, client: AsyncOpenAI) -> None:
        fields = {"prompt": PROMPTS, "n": 2, "temperature": 0.9, "seed": 3}
        assert await streamed_texts(client, target, **fields) == await texts(client, target, **fields)

    @pytest.mark.usefixtures("chat")
    async def test_a_chat_has_n_choices_too(self, target: Target, client: AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": PROMPT}]
        fields: dict[str, Any] = {"model": target.model, "messages": messages, "n": 3, "max_tokens": 6, "seed": 1}
        whole = await client.chat.completions.create(**fields)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        contents: dict[int, str] = {}
        roles: dict[int, list[str | None]] = {}
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                contents[choice.index] = contents.get(choice.index, "") + (choice.delta.content or "")
                roles.setdefault(choice.index, []).append(choice.delta.role)
        assert all(first == "assistant" and not any(rest) for first, *rest in roles.values())
        if target.is_exact:
            assert contents == {choice.index: choice.message.content for choice in whole.choices}
