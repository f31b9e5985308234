"""The Files and Batch API by the `openai` package, over a router with real links; only the engine is scripted."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types import Batch

from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.batches.batch_run import LOWEST_PRIORITY
from phalanx_router.batches.records import FINAL
from phalanx_router.batches.routes import MAX_UNFINISHED
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.settings import BatchSettings
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import make_settings
from tests.router.http_routers import PrintableEngine, running_engines

KEYS = (ApiKey("alice", "sk-1"), ApiKey("bob", "sk-2", models=("other",)))
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}


@dataclass
class Scene:
    """A router with the Batch API."""

    url: str
    fleet: RouterBackend
    folder: Path

    def client(self, key: str = "sk-1") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def upload(self, bodies: Mapping[str, dict[str, Any]], client: openai.AsyncOpenAI, url: str = CHAT) -> str:
        lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()]
        content = "\n".join(map(json.dumps, lines)).encode()
        return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id

    async def ended(self, id: str, client: openai.AsyncOpenAI) -> Batch:
        async with asyncio.timeout(60):
            while (batch := await client.batches.retrieve(id)).status not in FINAL:
                await asyncio.sleep(0.05)
        return batch

    async def answers(self, file_id: str | None, client: openai.AsyncOpenAI) -> dict[str, Any]:
        assert file_id is not None
        text = (await client.files.content(file_id)).text
        return {line["custom_id"]: line["response"] for line in map(json.loads, text.splitlines())}


@asynccontextmanager
async def batch_router(folder: Path, engine: PrintableEngine, max_bytes: int = 1 << 20) -> AsyncIterator[Scene]:
    async with running_engines(engine) as [leader]:
        app, fleet = make_router(
            make_settings(), StaticLeaders([leader]), RouterOptions(keys=KEYS, batches=BatchSettings(folder, max_bytes))
        )
        async with http_server(app) as address:
            await until(lambda: fleet.links.num_ready == 1)
            yield Scene(f"http://{address}", fleet, folder)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with batch_router(tmp_path, PrintableEngine()) as scene:
        yield scene


async def test_a_batch_answers_as_single_requests(scene: Scene) -> None:
    async with scene.client() as client:
        bodies = {f"line {number}": BODY | {"seed": number, "temperature": 1.0} for number in range(20)}
        batch = await client.batches.create(
            input_file_id=await scene.upload(bodies, client), endpoint=CHAT, completion_window="24h", metadata={"run": "1"}
        )
        assert batch.status == "validating" and batch.metadata == {"run": "1"}
        batch = await scene.ended(batch.id, client)
        assert batch.status == "completed" and batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (20, 20)
        answers = await scene.answers(batch.output_file_id, client)
        for id, body in bodies.items():
            alone = await client.chat.completions.create(**body)  # type: ignore[call-overload]
            answer = answers[id]["body"]
            assert answers[id]["status_code"] == 200
            assert answer["choices"][0]["message"]["content"] == alone.choices[0].message.content


async def test_a_batch_takes_requests_for_responses(scene: Scene) -> None:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 16, "temperature": 0}
    async with scene.client() as client:
        file = await scene.upload({"a": body}, client, "/v1/responses")
        batch = await client.batches.create(input_file_id=file, endpoint="/v1/responses", completion_window="24h")
        batch = await scene.ended(batch.id, client)
        answer = (await scene.answers(batch.output_file_id, client))["a"]["body"]
        alone = await client.responses.create(model="tiny", input="hello", max_output_tokens=16, temperature=0)
        assert answer["object"] == "response" and answer["output"][0]["content"][0]["text"] == alone.output_text
        assert re.fullmatch("resp_[0-9a-f]{32}", answer["id"]) and answer["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer["id"])


async def test_invalid_requests_fail_alone(scene: Scene) -> None:
    bodies = {"good": BODY, "bad": BODY | {"temperature": -1}, "other": BODY | {"model": "unknown"}}
    async with scene.client() as client:
        batch = await client.batches.create(
            input_file_id=await scene.upload(bodies, client), endpoint=CHAT, completion_window="24h"
        )
        batch = await scene.ended(batch.id, client)
        assert set(await scene.answers(batch.output_file_id, client)) == {"good"}
        errors = await scene.answers(batch.error_file_id, client)
        assert {id: answer["status_code"] for id, answer in errors.items()} == {"bad": 400, "other": 404}
        assert errors["bad"]["body"]["error"]["param"] == "temperature"


async def test_requests_run_behind_those_of_clients(tmp_path: Path) -> None:
    seen = list[int]()

    class Watching(PrintableEngine):
        def submit(self, request: Any, *arguments: Any, **names: Any) -> int:
            seen.append(request.priority)
            return super().submit(request, *arguments, **names)

    async with batch_router(tmp_path, Watching()) as scene, scene.client() as client:
        batch = await client.batches.create(
            input_file_id=await scene.upload({"a": BODY}, client), endpoint=CHAT, completion_window="24h"
        )
        await scene.ended(batch.id, client)
        await client.chat.completions.create(**BODY)  # type: ignore[call-overload]
    assert seen == [LOWEST_PRIORITY, 0]


async def test_lists_and_deletions(scene: Scene) -> None:
    async with scene.client() as client:
        ids = [await scene.upload({"a": BODY}, client) for _ in range(3)]
        listed = [file.id async for file in client.files.list(limit=2)]
        assert sorted(listed) == sorted(ids)
        await client.files.delete(ids[0])
        with pytest.raises(openai.NotFoundError) as caught:
            await client.files.retrieve(ids[0])
        assert caught.value.code == "file_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.list(after=ids[0])
        assert refused.value.param == "after"
        batches = [(await client.batches.create(input_file_id=id, endpoint=CHAT, completion_window="24h")).id for id in ids[1:]]
        assert sorted([batch.id async for batch in client.batches.list(limit=1)]) == sorted(batches)
        for id in batches:
            assert (await scene.ended(id, client)).status == "completed"


async def test_tenants_see_only_their_own(scene: Scene) -> None:
    async with scene.client() as alice, scene.client("sk-2") as bob:
        file = await scene.upload({"a": BODY}, alice)
        for call in (
            bob.files.retrieve(file),
            bob.files.content(file),
            bob.files.delete(file),
            bob.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each async for each in bob.files.list()] == []
        own = await bob.batches.create(input_file_id=await scene.upload({"a": BODY}, bob), endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.NotFoundError) as caught:
            await alice.batches.retrieve(own.id)
        assert caught.value.code == "batch_not_found"
        ended = await scene.ended(own.id, bob)
        errors = await scene.answers(ended.error_file_id, bob)
        assert errors["a"]["status_code"] == 404, "bob's key allows another model only"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"input_file_id": 5}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_names_its_field(scene: Scene, changes: dict[str, Any], param: str) -> None:
    async with scene.client() as client, httpx.AsyncClient(trust_env=False) as http:
        body = {"input_file_id": await scene.upload({"a": BODY}, client), "endpoint": CHAT, "completion_window": "24h"}
        headers = {"authorization": "Bearer sk-1"}
        answer = await http.post(f"{scene.url}/v1/batches", json=body | changes, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_wrong_uploads_are_refused(scene: Scene) -> None:
    headers = {"authorization": "Bearer sk-1"}
    async with httpx.AsyncClient(base_url=scene.url, headers=headers, trust_env=False) as http:
        file = {"file": ("in.jsonl", b"{}")}
        assert (await http.post("/v1/files", files=file, data={"purpose": "fine-tune"})).json()["error"]["param"] == "purpose"
        for wrong in (
            await http.post("/v1/files", files=file),
            await http.post("/v1/files", data={"purpose": "batch"}),
            await http.post("/v1/files", json={"purpose": "batch"}),
            await http.post("/v1/files", content=b"--x\r\nbroken", headers={"content-type": "multipart/form-data; boundary=x"}),
        ):
            assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error", wrong.text
        large = await http.post("/v1/files", files={"file": ("in.jsonl", b"x" * (1 << 21))}, data={"purpose": "batch"})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "storage_full")
        assert (await http.get("/v1/files/file-unknown/content")).status_code == 404
        assert (await http.get("/v1/files", headers={"authorization": "Bearer wrong"})).status_code == 401


async def test_cancelled_batches_end(tmp_path: Path) -> None:
    class Slow(PrintableEngine):
        async def run(self) -> None:
            while True:
                self.step()
                await asyncio.sleep(0.2)

    async with batch_router(tmp_path, Slow()) as scene, scene.client() as client:
        bodies = {f"line {number}": BODY | {"max_tokens": 20} for number in range(300)}
        batch = await client.batches.create(
            input_file_id=await scene.upload(bodies, client), endpoint=CHAT, completion_window="24h"
        )
        async with asyncio.timeout(30):
            while (await client.batches.retrieve(batch.id)).status != "in_progress":
                await asyncio.sleep(0.05)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        ended = await scene.ended(batch.id, client)
        assert ended.status == "cancelled" and ended.request_counts is not None
        assert ended.request_counts.completed + ended.request_counts.failed == 300 and ended.request_counts.failed > 0
        with pytest.raises(openai.ConflictError) as caught:
            await client.batches.cancel(batch.id)
        assert caught.value.code == "batch_ended"


async def test_a_restarted_router_continues_its_batches(tmp_path: Path) -> None:
    bodies = {f"line {number}": BODY for number in range(30)}
    engine = PrintableEngine()
    async with batch_router(tmp_path, engine) as scene, scene.client() as client:
        file = await scene.upload(bodies, client)
        batch = await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        await until(lambda: engine.num_submitted > 0)
    async with batch_router(tmp_path, PrintableEngine()) as scene, scene.client() as client:
        ended = await scene.ended(batch.id, client)
        assert ended.status == "completed" and set(await scene.answers(ended.output_file_id, client)) == set(bodies)


async def test_unfinished_batches_are_bounded(tmp_path: Path) -> None:
    class Stopped(PrintableEngine):
        async def run(self) -> None:
            await asyncio.Event().wait()

    async with batch_router(tmp_path, Stopped()) as scene, scene.client() as client, scene.client("sk-2") as bob:
        file = await scene.upload({"a": BODY}, client)
        for _ in range(MAX_UNFINISHED):
            await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert caught.value.code == "too_many_batches"
        other = await scene.upload({"a": BODY}, bob)
        await bob.batches.create(input_file_id=other, endpoint=CHAT, completion_window="24h")


async def test_without_a_folder_there_is_no_batch_api(tmp_path: Path) -> None:
    app, _ = make_router(make_settings(), StaticLeaders(()))
    async with http_server(app) as address, httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http:
        assert (await http.get("/v1/files")).status_code == (await http.post("/v1/batches", json={})).status_code == 404
