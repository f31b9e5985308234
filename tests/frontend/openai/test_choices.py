"""Several choices of one answer: merged streams, joint end."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_api.wire.router import choice_seed
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import Delta, KeepAlive
from tests.frontend.fakes import FakeBackend, Step, eos_id, token_deltas, token_ids
from tests.frontend.openai_target import Target, raw_request
from tests.frontend.posting import FULL, PATIENCE_S, events, post
from tests.frontend.serving import served


def by_choice(*scripts: Sequence[Step]) -> FakeBackend:
    """Plays a script per choice."""
    return FakeBackend(lambda request: scripts[int(request.id.rpartition("-")[2])])


async def test_each_choice_has_its_own_id_and_seed() -> None:
    backend = FakeBackend()
    await post(backend, prompt=["a", "b"], n=2, seed=9, max_tokens=1)
    parent = backend.requests[0].id.rpartition("-")[0]
    assert [request.id for request in backend.requests] == [f"{parent}-{index}" for index in range(4)]
    assert [request.sampling.seed for request in backend.requests] == [9, choice_seed(9, 1), 9, choice_seed(9, 1)]
    assert [request.prompt for request in backend.requests] == [[0, *token_ids(text)] for text in "aabb"]


async def test_prompts_without_seed_get_different_seeds() -> None:
    backend = FakeBackend()
    await post(backend, prompt=["a", "a"], max_tokens=1)
    assert len({request.sampling.seed for request in backend.requests}) == 2


async def test_choices_leave_as_they_come() -> None:
    first_may_go = asyncio.Event()

    def second() -> Iterator[Step]:
        yield Delta(index=0, tokens=token_ids("a"))
        first_may_go.set()  # only once that one ended
        yield KeepAlive()
        yield Delta(index=1, tokens=[eos_id()], finish="stop")

    scripts: list[Iterable[Step]] = [[first_may_go, *token_deltas(token_ids("b"), "length")], second()]
    backend = FakeBackend(lambda request: scripts[int(request.id.rpartition("-")[2])])
    answer = await post(backend, n=2, stream=True)
    chunks = [json.loads(event)["choices"][0] for event in events(answer)[:-1]]
    assert (chunks[0]["index"], chunks[0]["text"]) == (1, "a")
    ends = {chunk["index"]: chunk["finish_reason"] for chunk in chunks[1:]}
    assert ends == {0: "length", 1: "stop"} and len(chunks) == 3
    assert answer.text.count(": keep-alive\n") == 1 and answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_failed_choice_ends_all_with_one_error(is_streamed: bool) -> None:
    never = asyncio.Event()
    backend = by_choice([never], [FULL], [never])
    answer = await post(backend, n=3, stream=is_streamed)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "queue_full"
    ended = {await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) for _ in range(2)}
    assert ended == {backend.requests[0].id, backend.requests[2].id}


async def test_late_failure_of_a_choice_is_the_last_event() -> None:
    backend = by_choice([Delta(index=0, tokens=token_ids("a")), asyncio.Event()], [Delta(index=0, tokens=token_ids("b")), FULL])
    answer = await post(backend, n=2, stream=True)
    sent = [json.loads(event) for event in events(answer)]
    assert answer.status_code == 200 and sent[-1]["error"]["code"] == "queue_full"
    assert sum("error" in event for event in sent) == 1
    assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[0].id


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_aborts_every_choice(is_streamed: bool) -> None:
    running: set[str] = set()
    all_run = asyncio.Event()

    def script(request: wire.Request) -> Sequence[Step]:
        running.add(request.id)
        if len(running) == 3:
            all_run.set()
        return [Delta(index=0, tokens=token_ids("a")), asyncio.Event()]

    backend = FakeBackend(script)
    async with served(create_app(backend)) as url:
        async with raw_request(Target(url, "tiny"), {"stream": is_streamed, "n": 3}):
            await asyncio.wait_for(all_run.wait(), PATIENCE_S)
        assert {await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) for _ in range(3)} == running


async def test_a_stop_string_ends_its_choice_alone() -> None:
    endless: list[Step] = [Delta(index=0, tokens=token_ids("stop it")), asyncio.Event()]
    backend = by_choice(endless, token_deltas(token_ids("go on"), "length"))
    answer = (await post(backend, n=2, stop="it")).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("stop ", "stop"), ("go on", "length")]
    assert await asyncio.wait_for(backend.aborts.get(), PATIENCE_S) == backend.requests[0].id


@pytest.mark.parametrize(
    "script",
    [[Delta(index=0, tokens=token_ids("a"))], [Delta(index=0, tokens=token_ids("a")), RuntimeError("a bug")]],
    ids=["no reason", "bug"],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_choice_that_breaks_off_is_an_internal_error(script: list[Step], n: int) -> None:
    answer = await post(FakeBackend(lambda request: script), n=n)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_missing_requested_logprobs_are_an_internal_error() -> None:
    class Forgetful(FakeBackend):
        async def generate(self, request: wire.Request) -> Any:
            yield Delta(index=0, tokens=token_ids("a"), finish="length")

    answer = await post(Forgetful(), logprobs=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_metrics_count_every_choice_as_a_request() -> None:
    answer = await post(FakeBackend(), prompt=["a", "b"], n=2, max_tokens=3)
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_wishes_about_urgency_reach_the_backend(path: str) -> None:
    backend = FakeBackend()
    messages: dict[str, Any] = {} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    wishes: dict[str, Any] = {
        "priority": -3,
        "tenant": "a",
        "cache_salt": "s",
        "deadline_ms": 900.0,
        "ttft_target_ms": 50,
        "tpot_target_ms": 5,
    }
    await post(backend, path, max_tokens=1, user="someone", **messages, **wishes)
    request = backend.requests[0]
    assert (request.priority, request.tenant, request.cache_salt) == (-3, "a", "s")
    assert (request.deadline_ms, request.ttft_target_ms, request.tpot_target_ms) == (900.0, 50.0, 5.0)
    await post(backend, path, max_tokens=1, user="someone", **messages)
    assert (backend.requests[1].tenant, backend.requests[1].priority) == ("someone", 0)


async def test_bad_words_are_banned_at_start_and_after_space() -> None:
    backend = FakeBackend()
    await post(backend, max_tokens=1, bad_words=["lazy dog"])
    sequences = backend.requests[0].sampling.bad_words
    assert token_ids("lazy dog") in sequences
    assert all(sequence in (token_ids("lazy dog"), token_ids(" lazy dog")) for sequence in sequences)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logit_bias": {"100000": 1}}, "logit_bias"), ({"allowed_token_ids": [100000]}, "allowed_token_ids")],
    ids=["bias", "allowed"],
)
async def test_ids_beyond_the_vocabulary_are_refused(fields: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    answer = await post(backend, **fields)
    assert (answer.status_code, answer.json()["error"]["param"], backend.requests) == (400, param, [])
