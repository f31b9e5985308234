"""One trace of a stream through everything: a queue, prefill in chunks, two moves, a killed rank, a killed router.

Real processes, a tiny model in float64: two runtimes, two routers, a collector.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program, free_port, running, serving
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from tests.otlp import Collector, http_collector
from tests.polling import until, wait_until
from tests.router.clients import ReceivedStream, read
from tests.runtime.tiny import save_tiny
from tests.system.runtimes import ranks_of

pytestmark = pytest.mark.system
TOKEN = "a-service-token"
CHUNK = 64
DISTURBED_S = 20
"""The stream must outlast two moves and a replay, whatever the processor."""
PATIENCE_S = 300.0
"""Of a stream on a processor that became busy after its tokens were counted."""
BODY = {
    "model": "tiny",
    "prompt": "word " * 60,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
    "skip_special_tokens": False,
}
OTHER_PAGES = {"cache_salt": "the prompt is computed again"}
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    folder = tmp_path_factory.mktemp("traces")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = save_tiny(folder / "tiny", max_position_embeddings=16384)
    (folder / "token").write_text(TOKEN)
    flags = ["serve", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "32000000"]
    flags += ["--token-file", str(folder / "token"), "--dtype", "float64", "--max-num-batched-tokens", str(CHUNK)]
    with running("one", "phalanx_runtime", flags, folder) as one, running("two", "phalanx_runtime", flags, folder) as two:
        yield [one, two]


def router(runtimes: list[Program], folder: Path, collector: Collector, port: int, peer: int, ratio: float):  # type: ignore[no-untyped-def]
    """A router that exports to the collector."""
    (folder / "token").write_text(TOKEN)
    leaders = ",".join(program.base_url.removeprefix("http://") for program in runtimes)
    command = [sys.executable, "-m", "phalanx_router", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--leaders", leaders, "--token-file", str(folder / "token"), "--peers", f"127.0.0.1:{peer}"]
    return serving(f"router-{port}", command, port, "/readyz", folder, 60, collector.environment(ratio))


class Operator:
    """Sends policies to a router."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0

    async def order(self, evacuate: Sequence[str] = ()) -> RouterSummary:
        """Sends a policy; returns the router's summary."""
        self._number += 1
        poll = msgspec.json.encode(SummaryRequest(BalancePolicy(number=self._number, evacuate=list(evacuate)), 0.0))
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            response = await http.post(self._url + SUMMARY_PATH, content=poll, headers={"authorization": f"Bearer {TOKEN}"})
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=RouterSummary)

    async def busy(self, evacuate: Sequence[str] = ()) -> str:
        """The group with the stream; empty while it moves."""
        return next((group.group for group in (await self.order(evacuate)).groups if group.streams), "")

    async def evacuate(self, group: str, received: ReceivedStream) -> str:
        """Returns the group that the stream has moved to."""

        async def has_moved() -> bool:
            assert not received.is_done, "the stream was too short"
            return await self.busy([group]) not in ("", group)

        await until(has_moved)
        return await self.busy()


def num_tokens(url: str) -> int:
    """Returns how many tokens a stream has for `DISTURBED_S`, at most what takes a fast processor longer than the test needs."""
    warm, timed = {**BODY, **OTHER_PAGES, "max_tokens": 50}, {**BODY, **OTHER_PAGES, "max_tokens": 300}
    asyncio.run(read(url, warm))
    started_s = time.monotonic()
    asyncio.run(read(url, timed))
    return min(10_000, max(1000, int(300 / (time.monotonic() - started_s) * DISTURBED_S)))


async def disturbed(first: Program, second: Program, runtimes: list[Program], body: dict[str, object]) -> ReceivedStream:
    """Reads a stream that moves twice, loses its rank and then its router."""
    operator, received = Operator(first.base_url), ReceivedStream({}, {})
    parent = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
    reading = asyncio.create_task(read(first.base_url, body, received, traceparent=parent, patience_s=PATIENCE_S))
    await until(lambda: received.num_chars > 50)
    group = await operator.busy()
    for _ in range(2):
        group = await operator.evacuate(group, received)
    dying = next(program for program in runtimes if program.base_url.endswith(group))
    num_chars = received.num_chars
    await until(lambda: received.num_chars > num_chars + 50)  # else the group that is killed has computed nothing
    os.kill(ranks_of(dying)[0], signal.SIGKILL)
    other, num_chars = next(program for program in runtimes if program is not dying), received.num_chars

    async def has_replay() -> bool:
        assert not received.is_done, "the stream was too short"
        return await operator.busy() == other.base_url.removeprefix("http://") and received.num_chars > num_chars + 50

    await until(has_replay)
    await asyncio.sleep(1.0)  # the exporter sends every 0.1 s; spans within that time are lost with their router
    assert not received.is_done
    os.kill(first.process.pid, signal.SIGKILL)
    await reading
    assert not received.is_done and received.last
    return await read(second.base_url, body, received, patience_s=PATIENCE_S)


@pytest.mark.slow  # its stream, which must outlast two moves and a replay on any processor, takes up to a minute
def test_disturbed_stream_has_one_connected_trace(runtimes: list[Program], tmp_path: Path) -> None:
    ports = free_port(), free_port()
    with (
        http_collector() as collector,
        router(runtimes, tmp_path, collector, ports[0], ports[1], 0.0) as first,
        router(runtimes, tmp_path, collector, ports[1], ports[0], 0.0) as second,
    ):
        tokens = num_tokens(second.base_url)
        body = {**BODY, "max_tokens": tokens}
        whole = asyncio.run(read(second.base_url, body | OTHER_PAGES, patience_s=PATIENCE_S))
        began_s = time.time()
        received = asyncio.run(disturbed(first, second, runtimes, body))
        ended_s = time.time()
        wait_until(lambda: collector.named("resume"))
        wait_until(lambda: collector.named("text_completion tiny"))
    assert received.texts == whole.texts and received.is_done
    spans = collector.spans
    assert {span.trace_id for span in spans} == {CLIENT_TRACE}, "the stream that the client does not trace is not exported"
    (root,) = collector.named("text_completion tiny")
    assert root.parent_id == CLIENT_SPAN and began_s <= root.start_s <= root.end_s <= ended_s + 1
    assert root.attributes["gen_ai.usage.output_tokens"] == tokens
    assert all(span.parent_id == root.span_id for span in spans if span is not root), "a span is not connected to the root"
    assert all(root.start_s - 0.05 <= span.start_s <= span.end_s <= root.end_s + 0.05 for span in spans)
    check_parts(collector, tokens)


def check_parts(collector: Collector, tokens: int) -> None:
    moves, replays, decodes = collector.named("move"), collector.named("replay"), collector.named("decode")
    assert [move.attributes["phalanx.outcome"] for move in moves] == ["moved", "moved"]
    assert len(replays) == 1 and len(collector.named("resume")) == 1 and collector.named("wait")
    assert [decode.attributes["phalanx.epoch"] for decode in decodes] == [0, 1, 2, 3]
    lost = [decode for decode in decodes if decode.error]
    assert len(lost) == 1 and replays[0].start_s >= lost[0].end_s - 0.05
    prefills = collector.named("prefill")
    assert len(prefills[0].events) > 1 and sum(event[2]["phalanx.tokens"] for event in prefills[0].events) > CHUNK
    assert all(span.service.endswith("-engine") for span in (*collector.named("queue"), *prefills, *decodes))
    assert prefills[0].end_s <= decodes[0].start_s + 0.05
    assert sum(decode.attributes["phalanx.tokens"] for decode in decodes) <= tokens


def test_quick_request_outside_the_sample_exports_nothing(runtimes: list[Program], tmp_path: Path) -> None:
    port = free_port()
    with http_collector() as collector, router(runtimes, tmp_path, collector, port, free_port(), 0.0) as one:
        response = httpx.post(f"{one.base_url}/v1/completions", json={**BODY, "max_tokens": 4, "stream": False}, timeout=60)
        assert response.status_code == 200 and response.headers["traceparent"].startswith("00-")
        refused = httpx.post(f"{one.base_url}/v1/completions", json={**BODY, "model": "other"}, timeout=60)
        assert refused.status_code == 404
    assert collector.spans == []
