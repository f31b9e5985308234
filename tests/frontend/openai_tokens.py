"""Logprobs, echo and ids of tokens. Part of the OpenAI suite."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.frontend.openai_target import PROMPT, SuiteFixtures, Target

TOLERANCE = 1e-3  # of logprobs
FULL = {"ignore_eos": True}
"""Makes an answer as long as `max_tokens`."""


async def request(client: AsyncOpenAI, target: Target, **fields: Any) -> Any:
    """Returns a completion of eight greedy tokens, with these further fields."""
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "extra_body": FULL, **fields}
    return await client.completions.create(model=target.model, **fields)


async def joined(client: AsyncOpenAI, target: Target, **fields: Any) -> dict[str, Any]:
    """Returns the text and the four lists of logprobs of a streamed completion."""
    found: dict[str, Any] = {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    async for chunk in await request(client, target, stream=True, **fields):
        for choice in chunk.choices:
            found["text"] += choice.text
            if choice.logprobs is not None:
                for name, values in choice.logprobs.model_dump().items():
                    found[name] += values
    return found


def assert_lined_up(text: str, logprobs: dict[str, Any], k: int) -> None:
    """Offsets rise within the text; every token but a prompt's first has a logprob and top logprobs."""
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == len(offsets) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert offsets == sorted(offsets) and offsets[0] >= 0
    for token, offset, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        if end > offset and not token.startswith("bytes:"):
            assert text[offset:end] == token
    for token, logprob, tops in zip(tokens, logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        if logprob is not None:
            assert logprob <= 0 and tops[token] == logprob
            assert max(1, k) <= len(tops) <= k + 1


class TokenSuite(SuiteFixtures):
    """Requests for details of tokens."""

    @pytest.mark.parametrize("k", [0, 1, 5])
    async def test_logprobs_of_a_completion_line_up_with_its_text(self, target: Target, client: AsyncOpenAI, k: int) -> None:
        answer = await request(client, target, logprobs=k)
        choice = answer.choices[0]
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens == 8
        assert_lined_up(choice.text, choice.logprobs.model_dump(), k)
        for logprob, tops in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
            assert logprob >= max(tops.values()) - TOLERANCE, "greedy draws the most probable token"

    @pytest.mark.usefixtures("exact")
    @pytest.mark.parametrize("fields", [{"logprobs": 2}, {"logprobs": 2, "echo": True}], ids=["plain", "echo"])
    async def test_a_stream_s_logprobs_are_those_of_the_whole(
        self, target: Target, client: AsyncOpenAI, fields: dict[str, Any]
    ) -> None:
        choice = (await request(client, target, **fields)).choices[0]
        found = await joined(client, target, **fields)
        whole = choice.logprobs.model_dump()
        assert (found["text"], found["tokens"], found["text_offset"]) == (choice.text, whole["tokens"], whole["text_offset"])
        for one, other in zip(found["token_logprobs"], whole["token_logprobs"], strict=True):
            assert one == other is None or abs(one - other) < TOLERANCE

    @pytest.mark.usefixtures("exact")
    async def test_a_stop_string_loses_no_logprob(self, target: Target, client: AsyncOpenAI) -> None:
        free = (await request(client, target)).choices[0].text
        stop = free[4:7]
        cut = await request(client, target, stop=stop, logprobs=1)
        assert cut.choices[0].text == free[: free.index(stop)]
        assert len(cut.choices[0].logprobs.tokens) == cut.usage.completion_tokens
        found = await joined(client, target, stop=stop, logprobs=1)
        assert (found["text"], found["tokens"]) == (cut.choices[0].text, cut.choices[0].logprobs.tokens)

    @pytest.mark.parametrize("max_tokens", [0, 1, 4])
    async def test_echo_contains_the_prompt_and_its_logprobs(self, target: Target, client: AsyncOpenAI, max_tokens: int) -> None:
        async with target.http() as http:
            prompt = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        answer = await request(client, target, echo=True, logprobs=2, max_tokens=max_tokens)
        choice = answer.choices[0]
        assert choice.text.startswith(PROMPT)
        assert answer.usage.completion_tokens == max_tokens
        assert len(choice.logprobs.tokens) == len(prompt) + max_tokens
        assert [logprob is None for logprob in choice.logprobs.token_logprobs] == [True] + [False] * (
            len(prompt) - 1 + max_tokens
        )
        assert choice.logprobs.top_logprobs[0] is None
        assert_lined_up(choice.text, choice.logprobs.model_dump(), 2)
        assert choice.finish_reason == "length" and (max_tokens or choice.text == PROMPT)

    @pytest.mark.usefixtures("exact")
    async def test_echo_without_logprobs_prepends_the_prompt(self, target: Target, client: AsyncOpenAI) -> None:
        plain = (await request(client, target)).choices[0].text
        assert (await request(client, target, echo=True)).choices[0].text == PROMPT + plain
        assert (await joined(client, target, echo=True))["text"] == PROMPT + plain

    @pytest.mark.usefixtures("exact")
    async def test_echoed_logprobs_of_several_prompts_are_each_its_own(self, target: Target, client: AsyncOpenAI) -> None:
        """As lm-eval requests it: log-likelihoods of many texts in one request."""
        prompts = [PROMPT, f"{PROMPT} there", "The"]
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
        choices = (await request(client, target, prompt=prompts, **fields)).choices
        for index, prompt in enumerate(prompts):
            alone = (await request(client, target, prompt=prompt, **fields)).choices[0]
            assert choices[index].text == alone.text
            pairs = zip(choices[index].logprobs.token_logprobs[1:], alone.logprobs.token_logprobs[1:], strict=True)
            assert all(abs(one - other) < TOLERANCE for one, other in pairs)

    @pytest.mark.usefixtures("exact")
    async def test_the_prompt_s_logprobs_are_those_of_generating_it(self, target: Target, client: AsyncOpenAI) -> None:
        if not target.is_model:
            pytest.skip("the target has no real model")
        async with target.http() as http:
            prompt = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        answer = await request(client, target, prompt=prompt, logprobs=1, extra_body={**FULL, "return_token_ids": True})
        again = await request(client, target, prompt=prompt + answer.choices[0].token_ids, echo=True, logprobs=1, max_tokens=0)
        tail = again.choices[0].logprobs.token_logprobs[len(prompt) :]
        pairs = zip(answer.choices[0].logprobs.token_logprobs, tail, strict=True)
        assert all(abs(one - other) < TOLERANCE for one, other in pairs)

    async def test_prompt_logprobs_are_keyed_by_token_id(self, target: Target, client: AsyncOpenAI) -> None:
        answer = await request(client, target, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
        choice = answer.choices[0]
        assert choice.prompt_logprobs[0] is None
        for id, entry in zip(choice.prompt_token_ids[1:], choice.prompt_logprobs[1:], strict=True):
            assert {"logprob", "rank", "decoded_token"} == set(entry[str(id)])
            assert entry[str(id)]["rank"] >= 1 and len(entry) <= 2

    async def test_token_ids_are_returned_on_request(self, target: Target, client: AsyncOpenAI) -> None:
        options = {**FULL, "return_token_ids": True}
        choice = (await request(client, target, extra_body=options)).choices[0]
        assert len(choice.token_ids) == 8
        ids: list[int] = []
        prompt: list[int] = []
        async for chunk in await request(client, target, extra_body=options, stream=True):
            for part in chunk.choices:
                ids += part.token_ids
                prompt += getattr(part, "prompt_token_ids", None) or []
        assert prompt == choice.prompt_token_ids
        if target.is_exact:
            assert ids == choice.token_ids

    async def test_tokens_may_be_written_as_ids(self, target: Target, client: AsyncOpenAI) -> None:
        options = {**FULL, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choice = (await request(client, target, logprobs=1, extra_body=options)).choices[0]
        assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
        assert all(key.startswith("token_id:") for tops in choice.logprobs.top_logprobs for key in tops)

    async def test_gaps_are_returned_on_request(self, target: Target, client: AsyncOpenAI) -> None:
        options = {**FULL, "return_gaps": True}
        assert len((await request(client, target, extra_body=options)).choices[0].gaps) == 8
        chunks = [chunk async for chunk in await request(client, target, extra_body=options, stream=True)]
        assert sum(len(chunk.choices[0].gaps) for chunk in chunks) == 8

    async def test_chunks_contain_running_usage_on_request(self, target: Target, client: AsyncOpenAI) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        counts = [chunk.usage async for chunk in await request(client, target, stream=True, stream_options=options)]
        counted = [usage.completion_tokens for usage in counts]
        assert (
            counted == sorted(counted)
            and counted[-1] == 8
            and all(usage.prompt_tokens == counts[0].prompt_tokens for usage in counts)
        )

    @pytest.mark.usefixtures("chat")
    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    async def test_logprobs_of_a_chat(self, target: Target, client: AsyncOpenAI, is_streamed: bool) -> None:
        fields: dict[str, Any] = {
            "model": target.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0,
            "logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if is_streamed:
            chunks = [chunk async for chunk in await client.chat.completions.create(**fields, stream=True)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            content = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
        else:
            choice = (await client.chat.completions.create(**fields)).choices[0]
            text, content = choice.message.content or "", choice.logprobs.content
        assert len(content) == 8
        assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace").strip() == text.strip()
        for entry in content:
            assert len(entry.top_logprobs) == 3
            assert abs(entry.logprob - entry.top_logprobs[0].logprob) < TOLERANCE
