"""Prompts and answers reach no log, ring, core dump or metric of two groups and their router, and no span of its traces.

The router traces all requests. Programs end by SIGABRT while a stream with the marker runs: without their own limit they would
dump their cores. Files of batches keep text by design.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, free_port, running, serving
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from tests.otlp import Collector, http_collector
from tests.polling import until, wait_until
from tests.router.clients import ReceivedStream, read
from tests.system.runtimes import ranks_of, until_linked

pytestmark = pytest.mark.system
MARKER = "zanzibar-7741-quetzal"
NAMES = {"one", "two", "router"}
LEAST_CHARS, LEAST_KINDS = 16, 8
"""Of the parts of answers that are sought: shorter or uniform ones occur by accident."""
DRAWN = {"model": "tiny", "max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
CHAT = [{"role": "user", "content": MARKER}]
SCHEMA = {"type": "object", "properties": {MARKER: {"type": "integer", "maximum": 99}}, "required": [MARKER]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", DRAWN | {"prompt": MARKER}),
    ("/v1/completions", DRAWN | {"prompt": MARKER * 3, "seed": 6, "stop": [MARKER]}),
    ("/v1/chat/completions", DRAWN | {"messages": CHAT}),
    ("/v1/chat/completions", DRAWN | {"messages": CHAT, "response_format": FORMAT}),
    ("/v1/messages", DRAWN | {"messages": CHAT, "seed": 7}),
    ("/v1/responses", {"model": "tiny", "input": MARKER, "max_output_tokens": 60, "temperature": 1.0}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", DRAWN | {"prompt": MARKER, "model": MARKER}),
    ("/v1/completions", DRAWN | {"prompt": MARKER * 999}),
    ("/v1/completions", DRAWN | {"prompt": {MARKER: MARKER}}),
    ("/v1/chat/completions", DRAWN | {"messages": [{"role": "user", "content": {MARKER: 1}}]}),
    ("/v1/chat/completions", DRAWN | {"messages": CHAT, "response_format": FORMAT | {"json_schema": MARKER}}),
    ("/v1/messages", DRAWN | {"messages": MARKER}),
    ("/v1/responses", {"model": "tiny", "input": {MARKER: 1}}),
    (f"/v1/{MARKER}", {}),
]


@pytest.fixture
def dumps_cores() -> Iterator[None]:
    """Lets programs that this test starts dump their whole memory into their folders, if the system permits it."""
    own, limits = Path("/proc/self/coredump_filter"), resource.getrlimit(resource.RLIMIT_CORE)
    former = own.read_text()
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    own.write_text("0x33")
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)
    own.write_text(f"0x{former.strip()}")


def group(stack: ExitStack, name: str, model: Path, folder: Path) -> Program:
    (folder / name).mkdir()
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "8000000", "--token-file"]
    flags += [str(model.parent / "token"), "--flight-recorder-dir", str(folder / name / "rings")]
    return stack.enter_context(running(name, "phalanx_runtime", flags, folder, before=("env", "-C", str(folder / name))))


def router(stack: ExitStack, leaders: str, token: Path, folder: Path, collector: Collector) -> Program:
    (folder / "router").mkdir()
    port = free_port()
    command = ["env", "-C", str(folder / "router"), sys.executable, "-m", "phalanx_router", "serve", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--leaders", leaders, "--token-file", str(token), "--log-level", "debug"]
    command += ["--flight-recorder-dir", str(folder / "router" / "rings"), "--batches-dir", str(folder / "batches")]
    environment = collector.environment(1.0)
    return stack.enter_context(serving("router", command, port, "/readyz", folder, 60, environment))


async def answers(http: httpx.AsyncClient) -> list[str]:
    """Returns all texts that clients receive, of whole answers, streams and batches."""
    texts: list[str] = []
    for path, body in BODIES:
        whole = await http.post(path, json=body)
        assert whole.status_code == 200, (path, whole.text)
        texts += strings(whole.json())
        stream = await http.post(path, json=body | {"stream": True})
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert stream.status_code == 200 and events, path
        texts.append("".join(text for event in events for text in strings(event)))
    statuses = [(await http.post(path, json=body)).status_code for path, body in REFUSED]
    assert statuses == [404, 400, 400, 400, 400, 400, 400, 404]
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODIES[0][1] | {"seed": 8}})
    file = await http.post("/v1/files", files={"file": ("in.jsonl", line.encode())}, data={"purpose": "batch"})
    order = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    url = f"/v1/batches/{(await http.post('/v1/batches', json=order)).json()['id']}"

    async def output() -> str:
        return (await http.get(url)).json().get("output_file_id") or ""

    await until(output)
    return [*texts, *strings((await http.get(f"/v1/files/{await output()}/content")).json())]


def strings(document: Any) -> Iterator[str]:
    """Yields the texts and deltas of an answer."""
    for name, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            yield from strings(value)
        elif isinstance(value, str) and name in ("text", "content", "delta"):
            yield value


def patterns(texts: Iterable[str]) -> set[bytes]:
    """Returns the marker, and parts of the texts as programs and JSON write them."""
    parts = {text[at : at + LEAST_CHARS] for text in texts for at in range(0, len(text) - LEAST_CHARS + 1, LEAST_CHARS)}
    parts = {MARKER} | {part for part in parts if len(set(part)) >= LEAST_KINDS}
    return {form for part in parts for form in (part.encode(), json.dumps(part)[1:-1].encode())}


def found(folder: Path, sought: set[bytes]) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "batches" not in path.parts]
    contents = ((path, path.read_bytes()) for path in files)
    return [f"{path.relative_to(folder)}: {one!r}" for path, content in contents for one in sought if one in content]


async def busy(http: httpx.AsyncClient, number: int, token: str, evacuate: list[str]) -> str:
    """Sends a policy to the router. Returns the group with the stream; empty if none has one."""
    poll = msgspec.json.encode(SummaryRequest(BalancePolicy(number=number, evacuate=evacuate), 0.0))
    answer = await http.post(SUMMARY_PATH, content=poll, headers={"authorization": f"Bearer {token}"})
    groups = msgspec.json.decode(answer.content, type=RouterSummary).groups
    return next((group.group for group in groups if group.streams), "")


async def move_and_abort(http: httpx.AsyncClient, url: str, token: str, groups: dict[str, Program]) -> None:
    """Moves a stream, then aborts a rank of its group, the other leader, and leaves the router without groups."""
    received = ReceivedStream({}, {})
    body = DRAWN | {"prompt": MARKER, "max_tokens": 3900, "stream": True}
    reading = asyncio.create_task(read(url, body, received))
    await until(lambda: received.num_chars > 20)
    source = await busy(http, 1, token, [])

    async def has_moved() -> bool:
        assert not received.is_done, "the stream was too short"
        return await busy(http, 2, token, [source]) not in ("", source)

    await until(has_moved)
    (target,) = groups.keys() - {source}
    rank = ranks_of(groups[target])[0]
    os.kill(rank, signal.SIGABRT)
    await until(lambda: rank not in ranks_of(groups[target]))
    os.kill(groups[source].process.pid, signal.SIGABRT)
    reading.cancel()


def test_markers_are_in_no_file_metric_or_span(long_model: Path, tmp_path: Path, dumps_cores: None) -> None:
    token = long_model.parent / "token"
    with http_collector() as collector, ExitStack() as stack:
        programs = [group(stack, name, long_model, tmp_path) for name in ("one", "two")]
        groups = {program.base_url.removeprefix("http://"): program for program in programs}
        routing = router(stack, ",".join(groups), token, tmp_path, collector)
        until_linked(routing, 2)

        async def use() -> list[str]:
            async with httpx.AsyncClient(base_url=routing.base_url, trust_env=False, timeout=60) as http:
                texts = await answers(http)
                texts += [(await http.get(f"{program.base_url}/metrics")).text for program in (routing, *programs)]
                await move_and_abort(http, routing.base_url, token.read_text(), groups)
            return texts

        *texts, of_router, of_one, of_two = asyncio.run(use())
        wait_until(lambda: collector.named("move"))
        os.kill(routing.process.pid, signal.SIGABRT)
        wait_until(lambda: routing.process.poll() is not None)
    sought = patterns(texts)
    assert len(sought) > 2 * len(BODIES) and any(MARKER in text for text in texts), "answers are sought too"
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.glob("*/rings/*")} == NAMES
    assert [path for path in tmp_path.glob("*/core*") if path.is_file()] == [], "vector registers have pieces of texts"
    assert {span.name for span in collector.spans} >= {"text_completion tiny", "chat tiny", "prefill"}
    for name, text in {"metrics": of_router + of_one + of_two, "spans": repr(collector.spans)}.items():
        lines = text.splitlines() if name == "metrics" else [text]
        assert [line[:300] for line in lines if any(one in line.encode() for one in sought)] == [], name
    assert found(tmp_path, sought) == []
    (tmp_path / "one" / "planted").write_text(f"a line with {MARKER}\n")
    assert found(tmp_path, sought) == [f"one/planted: {MARKER.encode()!r}"]
