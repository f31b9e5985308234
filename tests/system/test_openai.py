"""One OpenAI suite, two servers: a runtime, and a router with two runtimes. Real processes, a tiny model."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import product
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from bench.frame.programs import Program, running
from tests.cluster.service import metric, stream_all
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import PATIENCE_S, Target, raw_request
from tests.polling import wait_until
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import TOKENS, metric_of, router_flags

pytestmark = pytest.mark.system


@dataclass(frozen=True, slots=True)
class Service:
    """Two runtimes and their router."""

    runtimes: list[Program]
    router: Program


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("programs")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny(folder / "tiny", max_position_embeddings=2048)
    token = folder / "token"
    token.write_text("a-service-token")
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file", str(token)]
    with (
        running("one", "phalanx_runtime", flags, folder) as one,
        running("two", "phalanx_runtime", flags, folder) as two,
        running("router", "phalanx_router", router_flags([one, two], token), folder) as router,
    ):
        yield Service([one, two], router)


@pytest.fixture(scope="module", params=["runtime", "router"])
def target(request: pytest.FixtureRequest, service: Service) -> Target:
    program = service.runtimes[0] if request.param == "runtime" else service.router
    prefix = "phalanx" if request.param == "runtime" else "phalanx_router"
    return Target(program.base_url, "tiny", long_tokens=1000, is_model=True, metrics_prefix=prefix)


class TestOpenAI(OpenAISuite):
    """The whole suite, against each server."""


async def complete(target: Target, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of a greedy completion."""
    async with target.client() as client:
        body: Any = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 100, "extra_body": fields}
        choice = (await client.completions.create(**body)).choices[0]
        return choice.text, choice.finish_reason


async def test_messages_equal_chat_completions(target: Target) -> None:
    turns: Any = [{"role": "user", "content": "Once upon a time"}]
    async with target.client() as client, AsyncAnthropic(base_url=target.base_url, api_key="unused", max_retries=0) as other:
        chat = await client.chat.completions.create(model="tiny", messages=turns, max_tokens=24, temperature=0)
        message = await other.messages.create(model="tiny", messages=turns, max_tokens=24, extra_body={"temperature": 0})
        async with other.messages.stream(model="tiny", messages=turns, max_tokens=24, extra_body={"temperature": 0}) as stream:
            streamed = await stream.get_final_message()
        counted = await other.messages.count_tokens(model="tiny", messages=turns)
    texts = ["".join(block.text for block in each.content if block.type == "text") for each in (message, streamed)]
    assert texts == [chat.choices[0].message.content] * 2 and texts[0]
    assert chat.usage is not None and counted.input_tokens == chat.usage.prompt_tokens
    assert message.usage.output_tokens == streamed.usage.output_tokens == chat.usage.completion_tokens


async def test_responses_equal_chat_completions(target: Target) -> None:
    """Also those that continue others, and those of a format."""
    turns: Any = [{"role": "user", "content": "Once upon a time"}]
    fixed: Any = {"model": "tiny", "temperature": 0}
    format: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    async with target.client() as client:
        chat = await client.chat.completions.create(messages=turns, max_tokens=24, **fixed)
        one = await client.responses.create(input=turns, max_output_tokens=24, **fixed)
        stream = await client.responses.create(input="Once upon a time", **fixed, max_output_tokens=24, stream=True)
        events = [event async for event in stream]
        turns += [{"role": "assistant", "content": chat.choices[0].message.content}, {"role": "user", "content": "and"}]
        longer = await client.chat.completions.create(messages=turns, max_tokens=24, **fixed)
        two = await client.responses.create(input="and", previous_response_id=one.id, max_output_tokens=24, **fixed)
        counted = await client.responses.input_tokens.count(model="tiny", input="and", previous_response_id=one.id)
        formed = await client.responses.create(input="x", text={"format": format}, **fixed)
        stored = await client.responses.retrieve(two.id)
    assert one.output_text == chat.choices[0].message.content and two.output_text == longer.choices[0].message.content
    assert one.output_text and stored.output_text == two.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == one.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == one.output_text
    assert chat.usage is not None and one.usage is not None and longer.usage is not None
    assert one.usage.output_tokens == chat.usage.completion_tokens and counted.input_tokens == longer.usage.prompt_tokens
    assert json.loads(formed.output_text)["a"] in ("x", "y") and formed.status == "completed"


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def test_idle_connection_stays_open_longer_than_clients_keep_it(target: Target) -> None:
    """httpx, and so the openai package, keeps a connection for 5 s, as long as the server's default."""
    client = HTTPConnection(target.base_url.removeprefix("http://"), timeout=10)
    client.auto_open = 0  # no reconnects
    client.connect()
    for pause_s in (0, 6):
        time.sleep(pause_s)
        client.request("GET", "/v1/models")
        answer = client.getresponse()
        assert (answer.status, bool(answer.read())) == (200, True)
    client.close()


async def test_output_has_the_requested_format(target: Target) -> None:
    named = {"name": "answer", "schema": SCHEMA, "strict": True}
    for fields in ({"response_format": {"type": "json_schema", "json_schema": named}}, {"structured_outputs": {"json": SCHEMA}}):
        text, finish = await complete(target, **fields)
        assert json.loads(text)["a"] in ("x", "y") and finish == "stop"
    assert (await complete(target, structured_outputs={"regex": "[ab]{3}"}))[0] in {"".join(w) for w in product("ab", repeat=3)}
    assert (await complete(target, guided_choice=["yes", "no"]))[0] in ("yes", "no")
    assert (await complete(target, guided_grammar='start: "a" "b"'))[0] == "ab"


async def test_sampling_fields_change_the_output(target: Target) -> None:
    async with target.http() as http:
        [*_, a] = (await http.post("/tokenize", json={"prompt": "a"})).json()["tokens"]
    fixed = {"ignore_eos": True, "max_tokens": 6}
    assert (await complete(target, allowed_token_ids=[a], **fixed))[0] == "a" * 6
    assert (await complete(target, logit_bias={str(a): 100}, **fixed))[0] == "a" * 6
    assert "a" not in (await complete(target, allowed_token_ids=[a, a + 1], bad_words=["a"], **fixed))[0]
    assert (await complete(target, logit_bias={str(a): 5}, allowed_token_ids=[a, a + 1, a + 2], presence_penalty=2, **fixed))[
        1
    ] == "length"


async def test_usage_reports_cached_tokens_for_every_answer(service: Service, target: Target) -> None:
    prompt = f"{target.metrics_prefix} repeats the same prompt. " * 10
    body: Any = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 20}
    for runtime in service.runtimes:  # the router may choose either
        async with Target(runtime.base_url, "tiny").http() as http:
            first = (await http.post("/v1/completions", json=body)).json()["usage"]
            assert first["prompt_tokens_details"]["cached_tokens"] < first["prompt_tokens"] - 1
    async with target.client() as client, target.http() as http:
        [*_, x] = (await http.post("/tokenize", json={"prompt": "x"})).json()["tokens"]
        body["extra_body"] = {"allowed_token_ids": [x]}
        more: Any
        for more, length in (({}, 20), ({"stop": "xxx"}, 3)):
            whole = (await client.completions.create(**body, **more)).usage
            chunks = await client.completions.create(**body, **more, stream=True, stream_options={"include_usage": True})
            for usage in (whole, [chunk.usage async for chunk in chunks][-1]):
                assert usage.completion_tokens == length
                assert usage.prompt_tokens_details.cached_tokens == first["prompt_tokens"] - 1


async def test_disconnect_from_a_whole_answer_frees_pages(service: Service) -> None:
    base_url = service.runtimes[0].base_url
    target = Target(base_url, "tiny")
    async with target.http() as http:

        async def value_of(name: str) -> float:
            return metric((await http.get("/metrics")).text, name)

        async def running() -> float:
            return await value_of("vllm:num_requests_running")

        async with asyncio.timeout(PATIENCE_S):
            while await running():
                pass
            before = await value_of("vllm:generation_tokens_total")
            async with raw_request(target, {"max_tokens": 1900, "n": 2}):
                while await running() < 2:
                    pass
            while await running():
                pass
        assert await value_of("vllm:kv_cache_usage_perc") == 0
        assert await value_of("vllm:generation_tokens_total") - before < 2 * 1900, "the requests were aborted"


def test_routed_request_is_counted_once(service: Service) -> None:
    """Sums over pods: the runtime counts it under vLLM's names, the router under its own."""

    def counts(name: str, programs: list[Program]) -> float:
        pages = [httpx.get(f"{program.base_url}/metrics", timeout=10).text for program in programs]
        return sum(
            float(line.rpartition(" ")[2])
            for page in pages
            for line in page.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        )

    programs = [*service.runtimes, service.router]
    names = [
        "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:request_queue_time_seconds_count",
        "vllm:time_to_first_token_seconds_count", "phalanx_router_requests_finished_total",
    ]  # fmt: skip
    before = [counts(name, programs) for name in names]
    body = {"prompt": "counted", "max_tokens": 7, "ignore_eos": True}
    assert httpx.post(f"{service.router.base_url}/v1/completions", json=body, timeout=60).status_code == 200
    assert [counts(name, programs) - earlier for name, earlier in zip(names, before, strict=True)] == [7, 1, 1, 1, 1]
    page = httpx.get(f"{service.router.base_url}/metrics", timeout=10).text
    assert "vllm:" not in page


def test_logs_name_requests_and_never_their_prompts(service: Service) -> None:
    secret, name = "the-vault-opens-at-midnight", "req-logged"
    bodies: list[dict[str, Any]] = [
        {"prompt": secret, "max_tokens": 3},
        {"prompt": secret, "max_tokens": 3, "stream": True},
        {"prompt": secret, "max_tokens": -1},
        {"prompt": secret * 400, "max_tokens": 3},
    ]
    for program in (service.runtimes[1], service.router):
        statuses = [
            httpx.post(f"{program.base_url}/v1/completions", json=body, timeout=60, headers={"X-Request-Id": name}).status_code
            for body in bodies
        ]
        assert statuses == [200, 200, 400, 400]
        assert name in program.log.read_text()
    for program in (*service.runtimes, service.router):
        assert secret not in program.log.read_text()


def test_runtime_reports_memory_per_rank(service: Service) -> None:
    metrics = httpx.get(f"{service.runtimes[1].base_url}/v1/metrics", timeout=10).json()
    (rank,) = metrics["memory"]
    assert rank["weights_bytes"] > 0 and rank["activations_bytes"] > 0 and rank["logits_sampler_bytes"] >= 0
    assert 0.9 * 8_000_000 < rank["kv_pool_bytes"] <= 8_000_000
    assert metrics["kv_bytes_per_token"] > 0
    routed = httpx.get(f"{service.router.base_url}/v1/metrics", timeout=10).json()
    assert (routed["kv_bytes_per_token"], routed["memory"]) == (metrics["kv_bytes_per_token"], []), "a router has no rank"
    assert sum(rank[f"{part}_bytes"] for part in ("weights", "activations", "logits_sampler", "kv_pool")) < rank["total_bytes"]


def cache_of(program: Program) -> dict[str, Any]:
    cache: dict[str, Any] = httpx.get(f"{program.base_url}/v1/metrics", timeout=10).json()["cache"] or {"lookups": 0}
    return cache


def test_metrics_show_the_curve_of_the_prefix_cache(service: Service) -> None:
    runtime = service.runtimes[1]
    body = {"model": "tiny", "prompt": "a turn of a conversation " * 20, "max_tokens": 2}
    before = cache_of(runtime)["lookups"]
    for _ in range(2):
        assert httpx.post(f"{runtime.base_url}/v1/completions", json=body, timeout=60).status_code == 200
    wait_until(lambda: cache_of(runtime)["lookups"] > before)
    wait_until(lambda: cache_of(runtime)["hit_rate"]["now"] > 0)
    rates = cache_of(runtime)["hit_rate"]
    assert list(rates) == ["half", "now", "twice", "four_times"] and list(rates.values()) == sorted(rates.values())
    wait_until(lambda: cache_of(service.router)["lookups"] > before)


def test_streams_survive_the_runtime_that_served_them(service: Service) -> None:
    fixed = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True}
    bodies = [{**fixed, "prompt": f"prompt {i}", "temperature": 0} for i in range(4)]
    bodies += [{**fixed, "prompt": f"prompt {i}", "temperature": 1.0, "seed": i} for i in range(4)]
    undisturbed = asyncio.run(stream_all(service.runtimes[1].base_url, bodies))
    assert [(a.error, a.usage) for a in undisturbed] == [(None, TOKENS)] * 8
    killed: list[int] = []

    def kill(chunks: int) -> None:
        if chunks % 100 == 6 and not killed:  # a fast engine sends the first chunks before it reports its requests
            pages = [httpx.get(f"{runtime.base_url}/metrics", timeout=10).text for runtime in service.runtimes]
            busy = [metric(page, "vllm:num_requests_running") for page in pages]
            if max(busy):  # on a busy machine the router may send all that its groups have computed at once
                killed.append(service.runtimes[busy.index(max(busy))].process.pid)  # the router may send all to one
                os.kill(killed[0], signal.SIGKILL)

    for _ in range(3):
        survived = asyncio.run(stream_all(service.router.base_url, bodies, kill))
        if killed:
            break
    assert killed
    assert [a.error for a in survived] == [None] * 8
    assert [a.text for a in survived] == [a.text for a in undisturbed]
    assert metric_of(service.router, "phalanx_router_replays_total") > 0
