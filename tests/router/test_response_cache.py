"""Equal requests are answered from the router's memory, as by a group, and nothing else is."""

import asyncio
import json
import pathlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_frontend.stream.response_cache import MISS, CacheAnswer, CachedOutput, CacheQuery, Question
from phalanx_frontend.text.tokenizer import TextKey
from phalanx_router.__main__ import main
from phalanx_router.operator_endpoint import PURGE_PATH
from phalanx_router.responses.cache import RouterResponseCache
from phalanx_router.responses.metrics import ResponseCacheMetrics
from tests.frontend.fakes import tiny_assets
from tests.frontend.tool_chat import TOOL, TOOLS_TEMPLATE
from tests.polling import until
from tests.router.cached_routers import CACHE, CachedRouter, cached_router, printing_leader
from tests.router.fakes import TOKEN, FakeLeader, make_request, make_settings, running_world

COMPLETION: Mapping[str, Any] = {"prompt": "once upon", "max_tokens": 40, "temperature": 0}
CHAT: Mapping[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0}
BODIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "seeded": ("/v1/completions", {**COMPLETION, "temperature": 0.7, "seed": 5}),
    "chat": ("/v1/chat/completions", CHAT),
    "generate": ("/v1/generate", COMPLETION),
}
VARIABLE = {"id", "created", "request_id", "latency_ms", "throughput_tokens_per_sec"}
"""Fields that differ between equal requests."""


def result_of(response: httpx.Response) -> str | None:
    value: str | None = response.headers.get("x-phalanx-cache")
    return value


def chunks(response: httpx.Response) -> list[Any]:
    """Documents of a stream, which ends as every stream."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event) for event in events if event != "[DONE]"]


def text_of(documents: list[Any]) -> str:
    choices = [choice for document in documents for choice in document.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("name", BODIES)
async def test_equal_request_gets_the_stored_document(name: str) -> None:
    path, body = BODIES[name]
    async with cached_router(printing_leader()) as router:
        first, second = [await router.post(body, path) for _ in range(2)]
        assert (result_of(first), result_of(second), router.num_computed) == ("miss", "exact", 1)
        documents = [{k: v for k, v in response.json().items() if k not in VARIABLE} for response in (first, second)]
        assert documents[0] == documents[1] and "length" in second.text
        assert await router.metric("hits_total", '{kind="exact"}') == await router.metric("misses_total") == 1
        assert await router.metric("tokens_saved_total", '{kind="output"}') == 40
        assert await router.metric("tokens_saved_total", '{kind="prompt"}') > 0
        assert await router.metric("seconds_saved_total") > 0
        assert await router.metric("entries") == 1 and await router.metric("bytes") > 160


@pytest.mark.parametrize("name", ["completion", "chat"])
async def test_stream_from_the_cache_looks_like_a_stream(name: str) -> None:
    path, body = BODIES[name]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with cached_router(printing_leader()) as router:
        first, second = [await router.post(streamed, path) for _ in range(2)]
        assert (result_of(first), result_of(second), router.num_computed) == ("miss", "exact", 1)
        computed, stored = chunks(first), chunks(second)
        assert text_of(stored) == text_of(computed) and len(text_of(stored)) > 20
        forms = [{json.dumps(shape(chunk)) for chunk in some} for some in (computed, stored)]
        assert forms[0] == forms[1], "each chunk has the fields of a computed one"
        assert len(stored) > 8 and stored[-1]["usage"] == computed[-1]["usage"]
        assert first.text.count("data: [DONE]") == second.text.count("data: [DONE]") == 1
        assert "id: " in second.text
        page = (await router.http.get("/metrics")).text
        gaps, means = (
            float(re.findall(rf"^phalanx_router_{name}_seconds_count{{.*}} (\S+)$", page, re.MULTILINE)[0])
            for name in ("inter_token_latency", "time_per_output_token")
        )
        assert 0 < gaps < 40 and means == 1, "no time passes between stored tokens"


def shape(value: Any) -> Any:
    """Names of the fields, with the finish reason."""
    if isinstance(value, dict):
        return {key: value[key] if key == "finish_reason" else shape(value[key]) for key in sorted(value)}
    return [shape(item) for item in value] if isinstance(value, list) else None


async def test_real_client_reads_both_forms() -> None:
    async with cached_router(printing_leader()) as router:
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(base_url=f"{router.http.base_url}/v1", api_key="sk-1", max_retries=0, http_client=http) as client:
            whole = (await client.completions.create(model="tiny", **COMPLETION)).choices[0].text
            stream = await client.completions.create(model="tiny", stream=True, **COMPLETION)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == whole
            raw = await client.completions.with_raw_response.create(model="tiny", **COMPLETION)
            assert raw.headers["x-phalanx-cache"] == "exact" and raw.parse().choices[0].text == whole
        assert router.num_computed == 1


EXCLUDED: dict[str, tuple[Mapping[str, Any], dict[str, str]]] = {
    "no-store in the body": ({**COMPLETION, "cache": "no-store"}, {}),
    "no-store in the header": (COMPLETION, {"cache_control": "max-age=0, No-Store"}),
    "several choices": ({**COMPLETION, "n": 2}, {}),
    "several prompts": ({**COMPLETION, "prompt": ["a", "b"]}, {}),
    "logprobs": ({**COMPLETION, "logprobs": 0}, {}),
    "gaps": ({**COMPLETION, "return_gaps": True}, {}),
    "a random seed": ({**COMPLETION, "temperature": 0.7}, {}),
    "tools": ({**CHAT, "tools": [TOOL]}, {}),
    "only the prompt": ({**COMPLETION, "max_tokens": 0, "echo": True}, {}),
}


@pytest.mark.parametrize("name", EXCLUDED)
async def test_excluded_request_is_computed_each_time(name: str) -> None:
    body, headers = EXCLUDED[name]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assets = tiny_assets(chat_template=TOOLS_TEMPLATE)
    async with cached_router(printing_leader(assets=assets)) as router:
        await router.post(CHAT if "messages" in body else COMPLETION, path)
        before = router.num_computed
        responses = [await router.post(body, path, **headers) for _ in range(2)]
        per_request = 2 if name.startswith("several") else 1
        assert router.num_computed == before + 2 * per_request
        assert [result_of(response) for response in responses] == [None, None]
        assert await router.metric("entries") == 1


USER = [{"role": "user", "content": "hi"}]
PATHS: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/generate": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 40, "temperature": 0},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 40, "temperature": 0},
}


@pytest.mark.parametrize("path", PATHS)
async def test_field_of_each_api_forbids_storing(path: str) -> None:
    async with cached_router(printing_leader()) as router:
        bodies: list[dict[str, Any]] = [{"cache": "no-store"}, {}, {}, {"cache": "no-store"}]
        results = [result_of(await router.post({**PATHS[path], **fields}, path)) for fields in bodies]
        assert (results, router.num_computed) == ([None, "miss", "exact", None], 3)


async def test_header_in_two_lines_forbids_storing() -> None:
    lines = [("authorization", "Bearer sk-1"), ("cache-control", "no-store"), ("cache-control", "max-age=0")]
    async with cached_router(printing_leader()) as router:
        for _ in range(2):
            response = await router.http.post("/v1/completions", json=dict(COMPLETION), headers=lines)
            assert response.status_code == 200 and result_of(response) is None
        assert router.num_computed == 2


@pytest.mark.parametrize("difference", [{"max_tokens": 39}, {"prompt": "once"}, {"cache_salt": "x"}, {"stop": ["zzz"]}], ids=str)
async def test_different_request_is_a_miss(difference: dict[str, Any]) -> None:
    async with cached_router(printing_leader()) as router:
        await router.post(COMPLETION)
        assert result_of(await router.post({**COMPLETION, **difference})) == "miss"
        assert router.num_computed == 2


@pytest.mark.parametrize(("scope", "result"), [("tenant", "miss"), ("service", "exact")])
async def test_tenants_share_responses_only_by_scope(scope: Any, result: str) -> None:
    async with cached_router(printing_leader(), cache=ResponseCachePolicy(scope=scope)) as router:
        await router.post(COMPLETION, key="sk-1")
        assert result_of(await router.post(COMPLETION, key="sk-2")) == result


async def test_narrower_scope_drops_shared_responses() -> None:
    async with cached_router(printing_leader(), cache=ResponseCachePolicy(scope="service")) as router:
        await router.post(COMPLETION)
        router.set_policy(CACHE)
        assert result_of(await router.post(COMPLETION)) == "miss"


async def test_text_ends_at_the_stop_string_again() -> None:
    async with cached_router(printing_leader()) as router:
        whole = (await router.post(COMPLETION)).json()["choices"][0]["text"]
        body = {**COMPLETION, "stop": [whole[10:13]], "stream": True}
        first, second = [await router.post(body) for _ in range(2)]
        assert (result_of(first), result_of(second)) == ("miss", "exact")
        assert text_of(chunks(first)) == text_of(chunks(second)) == whole[: whole.index(whole[10:13])]
        assert chunks(second)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_unfinished_response_is_not_stored() -> None:
    leader = printing_leader(hold_at=5)
    async with cached_router(leader) as router:
        headers = {"authorization": "Bearer sk-1"}
        body = {**COMPLETION, "stream": True}
        async with router.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            await anext(response.aiter_bytes())
        await until(lambda: not router.fleet.sessions)
        leader.release()
        assert result_of(await router.post(COMPLETION)) == "miss"


async def test_coalesced_response_is_stored() -> None:
    leader = printing_leader(hold_at=0)
    async with cached_router(leader, coalesces=True) as router:
        asking = [asyncio.create_task(router.post(COMPLETION)) for _ in range(3)]
        await until(lambda: len(router.fleet.sessions) == 3)
        leader.release()
        await asyncio.gather(*asking)
        assert result_of(await router.post(COMPLETION)) == "exact"
        assert router.num_computed == 1 and await router.metric("entries") == 1


async def test_cached_stream_can_be_resumed() -> None:
    async with cached_router(printing_leader()) as router:
        body = {**COMPLETION, "stream": True}
        await router.post(body)
        stream = await router.post(body)
        ids = [line.removeprefix("id: ") for line in stream.text.splitlines() if line.startswith("id: ")]
        part = text_of(chunks(stream)[:3])
        rest = await router.post(body, last_event_id=ids[2])
        assert part + text_of(chunks(rest)) == text_of(chunks(stream))
        assert (result_of(rest), router.num_computed) == (None, 1)


async def test_responses_end_with_their_revision() -> None:
    old, new = printing_leader("a"), printing_leader("b")
    new.revision = "r2"
    async with cached_router(old, new) as router:
        router.source.change(old.endpoint())
        await until(lambda: router.fleet.links.num_ready == 1)
        await router.post(COMPLETION)
        assert result_of(await router.post(COMPLETION)) == "exact"
        router.source.change(old.endpoint(), new.endpoint(created="9"))
        await until(lambda: router.fleet.links.num_ready == 2)
        assert result_of(await router.post(COMPLETION)) == "exact", "groups of both revisions serve"
        router.source.change(new.endpoint(created="9"))
        assert result_of(await router.post(COMPLETION)) == "miss"
        assert await router.metric("entries") == 1 and router.num_computed == 2
        router.source.change()
        response = await router.http.post("/v1/completions", json=dict(COMPLETION), headers={"authorization": "Bearer sk-1"})
        assert response.status_code == 503, "without groups nothing is served"


async def test_stored_response_of_a_canary_waits_for_its_promotion() -> None:
    old, new = printing_leader("a"), printing_leader("b")
    new.revision = "r2"
    async with cached_router(old, new) as router:
        router.source.change(new.endpoint(created="9"))
        await until(lambda: router.fleet.links.revisions() == ["r2 "])
        await router.post(COMPLETION)
        router.fleet.balancing.set_policy(BalancePolicy(number=1, response_cache=CACHE, canary="r2", canary_percent=0))
        assert result_of(await router.post(COMPLETION)) == "exact", "no other revision serves"
        router.source.change(old.endpoint(), new.endpoint(created="9"))
        await until(lambda: router.fleet.links.num_ready == 2)
        assert [result_of(await router.post(COMPLETION)) for _ in range(2)] == ["miss", "exact"]
        assert (len(old.submitted), len(new.submitted)) == (1, 1)


async def test_response_of_two_revisions_is_not_stored() -> None:
    old, new = printing_leader("a", hold_at=5), printing_leader("b")
    new.revision = "r2"
    async with cached_router(old, new) as router:
        router.source.change(old.endpoint())
        await until(lambda: router.fleet.links.num_ready == 1)
        asking = asyncio.create_task(router.post(COMPLETION))
        await until(lambda: [len(session.stream.journal.delivered) for session in router.fleet.sessions] == [5])
        router.source.change(old.endpoint(), new.endpoint(created="9"))
        await until(lambda: router.fleet.links.num_ready == 2)
        await old.stop()
        assert result_of(await asking) == "miss" and router.num_computed == 2
        assert [len(submit.request.delivered) for submit in new.submitted] == [5]
        assert await router.metric("entries") == 0 and result_of(await router.post(COMPLETION)) == "miss"


async def test_lost_link_keeps_the_responses_of_its_group() -> None:
    leader = printing_leader()
    leader.state = wire.State(serving=True, incarnation=1, served=wire.Served("weights-1"))
    async with cached_router(leader) as router:
        await router.post(COMPLETION)
        leader.cut()
        await until(lambda: not router.fleet.links.open_links())
        await until(lambda: router.fleet.links.num_ready == 1)
        assert result_of(await router.post(COMPLETION)) == "exact"
        await leader.send(wire.State(serving=True, incarnation=2, served=wire.Served("weights-2")))
        await until(lambda: router.fleet.links.revisions() == ["r1 weights-2"])
        assert result_of(await router.post(COMPLETION)) == "miss", "other weights"


async def test_policy_switches_and_bounds_the_cache() -> None:
    async with cached_router(printing_leader(), cache=None) as router:
        responses = [await router.post(COMPLETION) for _ in range(2)]
        assert [result_of(response) for response in responses] == [None, None]
        router.set_policy(ResponseCachePolicy(max_entries=3))
        for number in range(5):
            await router.post({**COMPLETION, "prompt": f"prompt {number}"})
        assert await router.metric("entries") == 3
        router.set_policy(None)
        assert result_of(await router.post(COMPLETION)) is None
        router.fleet.balancing.tick()
        assert await router.metric("entries") == await router.metric("bytes") == 0
        router.set_policy(CACHE)
        assert result_of(await router.post({**COMPLETION, "prompt": "prompt 4"})) == "miss"


async def test_stored_response_ages_by_the_clock() -> None:
    now = 100.0
    async with running_world(
        FakeLeader(), settings=replace(make_settings(), policy=BalancePolicy(response_cache=CACHE))
    ) as world:
        cache = RouterResponseCache(world.fleet, ResponseCacheMetrics(world.registry), clock=lambda: now)
        query = CacheQuery(make_request())
        stream = world.fleet.generate(query.request)
        await anext(stream)
        output = CachedOutput(tokens=[1, 2], finish="stop", cached_tokens=0, seconds=1.5)
        cache.store(query, output, MISS)
        cache.encodings.put(TextKey(("hash", "", ""), "once upon a time " * 40, True), [1, 2])
        assert cache.encodings.parts.encode(("hash", "", ""), "once upon", lambda text: [1]) == [1, 1]
        assert cache.guard.differs("Is it open?", "Is it closed?") == "polarity" and len(cache.guard) == 2
        await stream.aclose()  # type: ignore[attr-defined]
        cache.store(CacheQuery(make_request(prompt=[9])), output, MISS)  # no open stream: its revision is unknown
        now += CACHE.ttl_s - 1
        assert await cache.find(query) == CacheAnswer(result="exact", output=output)
        assert await cache.find(CacheQuery(make_request(prompt=[9]))) == MISS
        assert world.metric("phalanx_router_response_cache_entries") == len(cache.encodings) == 1
        now += 1
        world.fleet.balancing.tick()
        assert world.metric("phalanx_router_response_cache_entries") == 0, "an old response is dropped without a request"
        assert len(cache.encodings) == len(cache.encodings.parts) == len(cache.guard) == 0, "and texts with the last response"
        assert await cache.find(query) == MISS
        assert world.metric("phalanx_router_response_cache_seconds_saved_total") == 1.5


async def purge(router: CachedRouter, token: str = TOKEN, method: str = "POST") -> httpx.Response:
    return await router.http.request(method, PURGE_PATH, headers={"authorization": f"Bearer {token}"})


async def test_purge_drops_all_responses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "phalanx.audit")
    async with cached_router(printing_leader()) as router:
        for key in ("sk-1", "sk-2"):
            await router.post(COMPLETION, key=key)
        refused = await purge(router, "sk-1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")
        assert (await purge(router, method="GET")).status_code == 405
        assert await router.metric("entries") == 2
        assert (await purge(router)).json() == {"purged": 2}
        assert result_of(await router.post(COMPLETION)) == "miss"
    lines = [record.__dict__ for record in caplog.records if record.name == "phalanx.audit"]
    assert [(line["verb"], line["caller"], line["outcome"]) for line in lines] == [
        ("authenticate", "", "refused"),
        ("purge", "service token", "done"),
    ]
    assert (lines[1]["object"], lines[1]["responses"]) == ("responses", 2)


async def test_response_in_computation_at_a_purge_is_not_stored() -> None:
    """Neither by the request that computes it, nor by one that joins later."""
    leader = printing_leader(hold_at=3)
    async with cached_router(leader, coalesces=True) as router:
        asking = [asyncio.create_task(router.post(COMPLETION))]
        await until(lambda: [len(session.stream.journal.delivered) for session in router.fleet.sessions] == [3])
        assert (await purge(router)).json() == {"purged": 0}
        asking.append(asyncio.create_task(router.post(COMPLETION)))
        await until(lambda: len(router.fleet.sessions) == 2)
        leader.release()
        await asyncio.gather(*asking)
        assert router.num_computed == 1
        assert [result_of(await router.post(COMPLETION)) for _ in range(2)] == ["miss", "exact"]


async def test_command_purges_the_router_of_its_pod(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with cached_router(printing_leader()) as router:
        await router.post(COMPLETION)
        file = tmp_path / "token"
        file.write_text(TOKEN)
        command = ["purge-cache", "--port", str(router.http.base_url.port), "--token-file", str(file)]
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out == "1\n"
        assert await router.metric("entries") == 0
        file.write_text("wrong")
        assert await asyncio.to_thread(main, command) == 1
        assert "service token" in capsys.readouterr().err
    assert main([*command[:2], "1", *command[3:]]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_policy_of_an_older_operator_has_no_cache() -> None:
    old = {name: value for name, value in msgspec.to_builtins(BalancePolicy()).items() if name != "response_cache"}
    assert msgspec.convert(old, BalancePolicy).response_cache is None


async def test_query_needs_the_object_that_the_backend_got() -> None:
    """Clients may repeat ids, which name no stream for sure."""
    async with running_world(FakeLeader()) as world:
        request = make_request()
        stream = world.fleet.generate(request)
        await anext(stream)
        assert world.fleet.revision_of(request).startswith("r1 ")
        assert world.fleet.revision_of(msgspec.structs.replace(request)) == ""
        await stream.aclose()  # type: ignore[attr-defined]
        assert world.fleet.revision_of(request) == ""
    assert isinstance(request, wire.Request)


def failing_question() -> Question | None:
    raise RecursionError


async def test_failed_lookup_is_a_miss() -> None:
    policy = BalancePolicy(response_cache=ResponseCachePolicy(semantic=True))
    async with running_world(FakeLeader(), settings=replace(make_settings(), policy=policy)) as world:
        cache = RouterResponseCache(world.fleet, ResponseCacheMetrics(world.registry))
        assert await cache.find(CacheQuery(make_request(), question=failing_question)) == MISS
        assert world.metric("phalanx_router_response_cache_misses_total") == 1
