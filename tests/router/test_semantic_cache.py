"""Similar questions are answered from the router's memory, within one conversation, and nothing else is."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from phalanx_api import wire
from phalanx_frontend.auth.api_keys import ApiKey, Quota
from phalanx_router.operator_endpoint import PURGE_PATH
from tests.examples import examples
from tests.frontend.fakes import CHAT_TEMPLATE, tiny_assets, tiny_tokenizer
from tests.frontend.tool_chat import TOOL, TOOLS_TEMPLATE
from tests.polling import until
from tests.router.cached_routers import CACHE, SEMANTIC, CachedRouter, cached_router, printing_leader, sharing_routers
from tests.router.fakes import TOKEN, FakeLeader
from tests.router.questions import (
    ASKED,
    CHAT,
    COMMON,
    COMPLETION,
    GENERATE,
    OTHER,
    SIMILAR,
    after,
    body,
    chunks,
    result_of,
    text_of,
    why,
)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
async def test_similar_question_gets_the_stored_answer(path: str) -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        first = await router.post(body(ASKED, path), path)
        second = await router.post(body(SIMILAR, path), path)
        assert result_of(first) == "miss" and result_of(second) in ("semantic; similarity=0.99", "semantic; similarity=1.00")
        assert (router.num_computed, router.num_embedded) == (1, 2), "the question of a stored response is embedded once"
        assert text_of(first) == text_of(second) and "length" in second.text
        assert await router.metric("hits_total", '{kind="semantic"}') == await router.metric("misses_total") == 1
        assert await router.metric("tokens_saved_total", '{kind="output"}') == 40
        assert await router.metric("seconds_saved_total") > 0
        assert await router.metric("similarity_count", '{result="hit"}') == 1
        assert await router.metric("entries") == 1 and await why(router, "no_candidate") == 1


async def test_usage_counts_the_prompt_that_was_asked() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        first, second = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR)]
        usages = [response.json()["usage"] for response in (first, second)]
        assert usages[1]["prompt_tokens"] > usages[0]["prompt_tokens"]
        assert usages[1]["completion_tokens"] == usages[0]["completion_tokens"] == 40


async def test_stream_from_a_similar_question_looks_like_a_stream() -> None:
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        computed = chunks(await router.post(body(ASKED, **fields), CHAT))
        response = await router.post(body(SIMILAR, **fields), CHAT)
        stored = chunks(response)
        assert str(result_of(response)).startswith("semantic") and router.num_computed == 1
        texts = ["".join(c["delta"].get("content") or "" for k in ks for c in k["choices"]) for ks in (computed, stored)]
        assert texts[0] == texts[1] and len(texts[0]) > 20
        assert {frozenset(chunk) for chunk in stored} == {frozenset(chunk) for chunk in computed}
        assert len(stored) > 8 and stored[-1]["usage"]["completion_tokens"] == 40
        assert response.text.count("data: [DONE]") == 1 and "id: " in response.text


async def test_real_client_reads_a_semantic_hit() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(base_url=f"{router.http.base_url}/v1", api_key="sk-1", max_retries=0, http_client=http) as client:
            raw = await client.chat.completions.with_raw_response.create(model="tiny", **body(ASKED))
            again = await client.chat.completions.with_raw_response.create(model="tiny", **body(SIMILAR))
            assert str(again.headers["x-phalanx-cache"]).startswith("semantic; similarity=")
            assert raw.parse().choices[0].message.content == again.parse().choices[0].message.content
            stream = await client.chat.completions.create(model="tiny", stream=True, **body(SIMILAR))
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == raw.parse().choices[0].message.content and router.num_computed == 1


async def test_exact_hit_asks_no_group() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        responses = [await router.post(body(text), CHAT) for text in (ASKED, ASKED)]
        assert [result_of(response) for response in responses] == ["miss", "exact"]
        assert (router.num_computed, router.num_embedded) == (1, 1)


async def test_semantic_half_works_alone() -> None:
    async with cached_router(printing_leader(), cache=msgspec.structs.replace(SEMANTIC, exact=False)) as router:
        responses = [await router.post(body(text), CHAT) for text in (ASKED, ASKED, SIMILAR)]
        assert result_of(responses[1]) == "semantic; similarity=1.00" and str(result_of(responses[2])).startswith("semantic")
        assert (router.num_computed, router.num_embedded) == (1, 3)


async def test_exact_half_embeds_nothing() -> None:
    async with cached_router(printing_leader(), cache=CACHE) as router:
        responses = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR)]
        assert [result_of(response) for response in responses] == ["miss", "miss"]
        assert (router.num_computed, router.num_embedded) == (2, 0)


STORED = after("be brief", "hello", "hi", text=ASKED)
DIFFERENT: dict[str, dict[str, Any]] = {
    "system prompt": after("be long", "hello", "hi", text=SIMILAR),
    "earlier question": after("be brief", "hey", "hi", text=SIMILAR),
    "earlier answer": after("be brief", "hello", "ho", text=SIMILAR),
    "fewer turns": after("be brief", text=SIMILAR),
    "max_tokens": {**after("be brief", "hello", "hi", text=SIMILAR), "max_tokens": 39},
    "no max_tokens": {k: v for k, v in after("be brief", "hello", "hi", text=SIMILAR).items() if k != "max_tokens"},
    "sampling": {**after("be brief", "hello", "hi", text=SIMILAR), "temperature": 0.7, "seed": 5},
    "penalty": {**after("be brief", "hello", "hi", text=SIMILAR), "presence_penalty": 1.0},
    "cache_salt": {**after("be brief", "hello", "hi", text=SIMILAR), "cache_salt": "x"},
    "stop": {**after("be brief", "hello", "hi", text=SIMILAR), "stop": ["zzz"]},
    "template": {**after("be brief", "hello", "hi", text=SIMILAR), "chat_template_kwargs": {"form": "x", "n": 10**30}},
    "output form": {**after("be brief", "hello", "hi", text=SIMILAR), "response_format": {"type": "json_object"}},
    "role": after("be brief", "hello", "hi", text=SIMILAR, role="tool"),
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_other_conversation_is_a_miss(name: str) -> None:
    assets = tiny_assets(chat_template="{{ form }}" + CHAT_TEMPLATE)
    async with cached_router(printing_leader(assets=assets), cache=SEMANTIC) as router:
        await router.post(STORED, CHAT)
        assert result_of(await router.post(DIFFERENT[name], CHAT)) == "miss"
        assert router.num_computed == 2
        same = after("be brief", "hello", "hi", text=SIMILAR)
        assert result_of(await router.post(same, CHAT)) != "miss" and router.num_computed == 2


@pytest.mark.parametrize(("form", "is_hit"), [("%Y", True), ("%f", False)], ids=["same year", "another microsecond"])
async def test_date_in_the_prompt_counts(form: str, is_hit: bool) -> None:
    assets = tiny_assets(chat_template="{{ strftime_now('" + form + "') }}" + CHAT_TEMPLATE)
    async with cached_router(printing_leader(assets=assets), cache=SEMANTIC) as router:
        _, second = [await router.post(body(text), CHAT) for text in (ASKED, SIMILAR)]
        assert str(result_of(second)).startswith("semantic") == is_hit and router.num_computed == (1 if is_hit else 2)


async def test_variables_without_effect_may_be_any_text() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        headers = {"authorization": "Bearer sk-1", "content-type": "application/json"}
        for text, half in ((ASKED, "\ud800"), (SIMILAR, "\ud801")):
            content = json.dumps(body(text, chat_template_kwargs={"half": half, "é": 1}))
            response = await router.http.post(CHAT, content=content, headers=headers)
            assert response.status_code == 200 and (result_of(response) == "miss") == (text == ASKED)
        assert router.num_computed == 1


@pytest.mark.parametrize(
    ("stored", "asked", "code"),
    [
        (ASKED, OTHER, "below_threshold"),
        (ASKED, ASKED + " please" * 5, "below_threshold"),
        ("france had 3 kings", "france had 4 kings", "guard_numbers"),
        ("france is a republic", "france is not a republic", "guard_negation"),
    ],
)
async def test_unlike_question_is_a_miss(stored: str, asked: str, code: str) -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        responses = [await router.post(body(text), CHAT) for text in (stored, asked)]
        assert [result_of(response) for response in responses] == ["miss", "miss"]
        assert await why(router, code) == 1 and await router.metric("entries") == 2


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
EXCLUDED: dict[str, tuple[dict[str, Any], str | None]] = {
    "no-store": (body(SIMILAR, cache="no-store"), None),
    "several choices": (body(SIMILAR, n=2), None),
    "logprobs": (body(SIMILAR, logprobs=True), None),
    "random seed": (body(SIMILAR, temperature=0.7), None),
    "tools": (body(SIMILAR, tools=[TOOL]), None),
    "last message of the model": ({**COMMON, "messages": [{"role": "assistant", "content": SIMILAR}]}, "miss"),
    "long message": (body(SIMILAR + " please" * 2000), "miss"),
    "blank message": (body("  "), "miss"),
    "tool result": (
        {
            **COMMON,
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "1", "tool_call_id": "a"},
                {"role": "user", "content": SIMILAR},
            ],
        },
        "miss",
    ),
}


@pytest.mark.parametrize("name", EXCLUDED)
async def test_excluded_request_is_embedded_never(name: str) -> None:
    excluded, result = EXCLUDED[name]
    async with cached_router(
        printing_leader(assets=tiny_assets(chat_template=TOOLS_TEMPLATE, max_model_len=1 << 14)), cache=SEMANTIC
    ) as router:
        await router.post(body(ASKED), CHAT)
        assert result_of(await router.post(excluded, CHAT)) == result
        assert router.num_embedded == 1 and router.num_computed >= 2


async def test_token_prompt_has_no_question() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        assert result_of(await router.post({**COMMON, "prompt": [5, 6, 7]}, COMPLETION)) == "miss"
        assert router.num_embedded == 0 and await why(router, "no_question") == 1


def draw_of_tenant(request: wire.Request, index: int) -> int:
    """A token that names the tenant."""
    return int(tiny_tokenizer().encode(request.tenant[0], add_special_tokens=False).ids[0])


QUESTIONS = [ASKED, SIMILAR, "please " + SIMILAR, OTHER, "please " + OTHER]


@dataclass(slots=True)
class Tenants:
    """Questions of two tenants to routers that share entries, and the entries that each router has."""

    routers: Sequence[CachedRouter]
    known: list[set[tuple[str, str, bool]]]
    """Of each router: tenant, question and whether it is a chat, of each entry."""
    num_hits: int = 0
    num_foreign_misses: int = 0
    """Misses although the router had the other tenant's entry of an equal question."""

    async def ask(self, number: int, key: str, question: str, is_chat: bool) -> None:
        """Asserts that the answer was computed for this tenant, and is from memory if the router has an equal question of it."""
        path, known, asked = CHAT if is_chat else COMPLETION, self.known[number], (key, question, is_chat)
        response = await self.routers[number].post(body(question, path, max_tokens=3), path, key=key)
        assert set(text_of(response)) == {"a" if key == "sk-1" else "b"}
        assert result_of(response) == "exact" or asked not in known
        is_miss = result_of(response) == "miss"
        self.num_hits += not is_miss
        self.num_foreign_misses += is_miss and ("sk-1" if key == "sk-2" else "sk-2", question, is_chat) in known
        if is_miss:
            known.add(asked)

    async def settle(self) -> None:
        """Waits until each router has the entries of all."""
        entries = set().union(*self.known)
        self.known = [set(entries) for _ in self.routers]

        async def are_shared() -> bool:
            return {await router.metric("entries") for router in self.routers} == {len(entries)}

        await until(are_shared)


Asked = tuple[int, str, str, bool]


async def ask_all(names: str, before: list[Asked], after: list[Asked]) -> tuple[int, int]:
    """Returns the hits, and the misses of questions that the other tenant had asked."""
    leader = printing_leader()
    leader.script.draw = draw_of_tenant
    async with AsyncExitStack() as stack:
        if len(names) == 1:
            routers = [await stack.enter_async_context(cached_router(leader, cache=SEMANTIC))]
        else:
            routers = await stack.enter_async_context(sharing_routers(names, leader, SEMANTIC))
        tenants = Tenants(routers, [set() for _ in routers])
        for asked in before:
            await tenants.ask(*asked)
        await tenants.settle()
        for asked in after:
            await tenants.ask(*asked)
        counts = [await router.metric("misses_total") for router in routers]
        assert sum(counts) + tenants.num_hits == len(before) + len(after)
    return tenants.num_hits, tenants.num_foreign_misses


@pytest.mark.parametrize("names", ["a", "ab"], ids=["one router", "two routers"])
def test_tenants_never_share_entries(names: str) -> None:
    asked = st.tuples(
        st.integers(0, len(names) - 1), st.sampled_from(["sk-1", "sk-2"]), st.sampled_from(QUESTIONS), st.booleans()
    )
    some, total = st.lists(asked, min_size=2, max_size=6), Counter[str]()

    @settings(max_examples=examples(8), deadline=None)
    @given(before=some, after=some)
    @example(before=[(0, "sk-1", ASKED, True)], after=[(len(names) - 1, "sk-2", ASKED, True), (0, "sk-1", SIMILAR, True)])
    def check(before: list[Asked], after: list[Asked]) -> None:
        hits, foreign_misses = asyncio.run(ask_all(names, before, after))
        total.update(hits=hits, foreign_misses=foreign_misses)

    check()
    assert total["hits"] > 0 and total["foreign_misses"] > 0


@pytest.mark.parametrize(("scope", "is_hit"), [("tenant", False), ("service", True)])
async def test_tenants_share_by_scope(scope: Any, is_hit: bool) -> None:
    async with cached_router(printing_leader(), cache=msgspec.structs.replace(SEMANTIC, scope=scope)) as router:
        await router.post(body(ASKED), CHAT, key="sk-1")
        assert str(result_of(await router.post(body(SIMILAR), CHAT, key="sk-2"))).startswith("semantic") == is_hit


async def test_embeddings_of_questions_count_in_no_quota() -> None:
    keys = [ApiKey("alice", "sk-1", quota=Quota(requests_per_minute=2))]
    async with cached_router(printing_leader(), cache=SEMANTIC, keys=keys) as router:
        for text in (ASKED, OTHER):
            await router.post(body(text), CHAT)
        assert router.num_embedded == 2
        refused = await router.http.post(CHAT, json=body("a third"), headers={"authorization": "Bearer sk-1"})
        assert refused.status_code == 429


async def test_requests_of_the_router_are_no_arrivals() -> None:
    async with cached_router(printing_leader(), cache=msgspec.structs.replace(SEMANTIC, recheck_share=1.0)) as router:
        for text in (ASKED, OTHER):
            await router.post(body(text), CHAT)
        await until(lambda: router.num_embedded)
        assert router.fleet.traffic.windows(time.monotonic())[-1].arrivals == 2


async def test_responses_end_with_their_revision() -> None:
    old, new = printing_leader("a"), printing_leader("b")
    new.revision = "r2"
    async with cached_router(old, new, cache=SEMANTIC) as router:
        router.source.change(old.endpoint())
        await until(lambda: router.fleet.links.num_ready == 1)
        await router.post(body(ASKED), CHAT)
        router.source.change(new.endpoint(created="9"))
        await until(lambda: router.fleet.links.revisions() == ["r2 "])
        assert result_of(await router.post(body(SIMILAR), CHAT)) == "miss"
        assert await router.metric("entries") == 1 and len(new.submitted) == 2


async def test_policy_switches_the_semantic_half_at_once() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        await router.post(body(ASKED), CHAT)
        router.set_policy(CACHE)
        assert result_of(await router.post(body(SIMILAR), CHAT)) == "miss"
        router.set_policy(msgspec.structs.replace(SEMANTIC, similarity=0.999))
        assert result_of(await router.post(body("please " + SIMILAR), CHAT)) == "miss"
        router.set_policy(SEMANTIC)
        assert str(result_of(await router.post(body("please please " + SIMILAR), CHAT))).startswith("semantic")


async def test_bytes_hold_under_a_flood_of_questions() -> None:
    bounds = msgspec.structs.replace(SEMANTIC, max_bytes=100_000)
    async with cached_router(printing_leader(), cache=bounds) as router:
        for number in range(80):
            await router.post(body(f"france had {number} kings", max_tokens=2), CHAT)
            assert await router.metric("bytes") <= 100_000
        assert 10 < await router.metric("entries") < 80


async def outcome_of(leader: FakeLeader, share: float = 1.0) -> tuple[dict[str, float], list[int]]:
    """Re-checks by outcome after a semantic hit, and the priorities of all computed requests."""
    outcomes = ("agreed", "disagreed", "failed")
    async with cached_router(leader, cache=msgspec.structs.replace(SEMANTIC, recheck_share=share)) as router:
        for text in (ASKED, SIMILAR):
            await router.post(body(text), CHAT)

        async def counted() -> dict[str, float]:
            return {outcome: await router.metric("rechecks_total", f'{{outcome="{outcome}"}}') for outcome in outcomes}

        async def has_ended() -> bool:
            return not share or any((await counted()).values())

        await until(has_ended)
        counts = await counted()
        requests = [submit.request for submit in leader.submitted if submit.request.pooling is None]
        return counts, [request.priority for request in requests]


async def test_recheck_finds_another_answer() -> None:
    counts, priorities = await outcome_of(printing_leader())
    assert counts == {"agreed": 0, "disagreed": 1, "failed": 0} and priorities == [0, 2**31 - 1]


async def test_recheck_finds_the_same_answer() -> None:
    leader = printing_leader()
    leader.script.draw = draw_of_tenant
    assert await outcome_of(leader) == ({"agreed": 1, "disagreed": 0, "failed": 0}, [0, 2**31 - 1])


async def test_recheck_compares_other_words_by_embedding() -> None:
    """Both answers begin with one letter, so their vectors agree."""
    leader, space = printing_leader(), tiny_tokenizer().encode(" ", add_special_tokens=False).ids[0]
    scripted = leader.script.draw
    leader.script.draw = lambda request, index: (5 + 60, space)[index] if index < 2 else scripted(request, index)
    assert (await outcome_of(leader))[0] == {"agreed": 1, "disagreed": 0, "failed": 0}


async def test_refused_recheck_fails_alone() -> None:
    def refuse(submit: wire.Submit) -> wire.Refused | None:
        refused = wire.Refused(handle=submit.handle, epoch=0, status=400, code="bad", message="no")
        return refused if submit.request.priority else None

    leader = printing_leader()
    leader.script.refuse = refuse
    assert (await outcome_of(leader))[0] == {"agreed": 0, "disagreed": 0, "failed": 1}


async def test_share_zero_rechecks_nothing() -> None:
    counts, priorities = await outcome_of(printing_leader(), share=0.0)
    assert not any(counts.values()) and priorities == [0]


async def test_purge_drops_similar_questions() -> None:
    async with cached_router(printing_leader(), cache=SEMANTIC) as router:
        await router.post(body(ASKED), CHAT)
        purged = await router.http.post(PURGE_PATH, headers={"authorization": f"Bearer {TOKEN}"})
        assert purged.json() == {"purged": 1} and await router.metric("bytes") == 0
        assert result_of(await router.post(body(SIMILAR), CHAT)) == "miss"
        assert str(result_of(await router.post(body(ASKED), CHAT))).startswith("semantic")
