"""The load generator against a small server with several dialects of OpenAI's API."""

import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from bench.engine import serve
from bench.engine.embeddings import PARTS, Part, report
from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.figures import Interval, mean_ratio, percentile, summary, table
from bench.frame.workload import spread_lengths, texts, token_ids
from phalanx_runtime.checkpoint.gguf.convert import convert
from tests.runtime.checkpoint.gguf_files import TinyGguf, vocabulary


@dataclass
class FakeOpenAI:
    """Answers every request with `chunks`, raw, then ends the response."""

    chunks: list[bytes] = field(default_factory=list)
    status: int = 200
    bodies: list[dict[str, object]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    base_url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
        self.running -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    fake = FakeOpenAI()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.handle)
    app.router.add_post("/v1/chat/completions", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(*texts: str, usage: int | None = None) -> list[bytes]:
    chunks = [event({"id": "x", "choices": [{"index": 0, "text": text}], "usage": None}) for text in texts]
    tokens = len(texts) if usage is None else usage
    return [*chunks, event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}), b"data: [DONE]\n\n"]


def chat(*texts: str) -> list[bytes]:
    first = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    chunks = [event({"choices": [{"delta": {"content": text}}]}) for text in texts]
    return [
        first,
        *chunks,
        event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(texts)}}),
        b"data: [DONE]\n\n",
    ]


async def answer_of(server: FakeOpenAI) -> Answer:
    async with session_for(1, None, 5.0) as session:
        return await stream_answer(session, f"{server.base_url}/v1/completions", {"prompt": "x"})


DIALECTS = {
    "completions": completion("a", "b", "c"),
    "chat": chat("a", "b", "c"),
    "one-piece": [b"".join(completion("a", "b", "c"))],
    "cut-anywhere": [bytes([byte]) for byte in b"".join(completion("a", "b", "c"))],
    "crlf-and-comments": [b": ping\r\n\r\n", *(chunk.replace(b"\n", b"\r\n") for chunk in completion("a", "b", "c"))],
    "no-space": [chunk.replace(b"data: ", b"data:") for chunk in completion("a", "b", "c")],
    "several-tokens-in-an-event": completion("ab", "c", usage=3),
}


@pytest.mark.parametrize("chunks", DIALECTS.values(), ids=DIALECTS)
async def test_answer_has_text_tokens_and_ordered_times(server: FakeOpenAI, chunks: list[bytes]) -> None:
    server.chunks = chunks
    answer = await answer_of(server)
    assert (answer.error, answer.text, answer.completion_tokens, answer.prompt_tokens) == (None, "abc", 3, 5)
    assert answer.tpot_s is not None
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert answer.tpot_s == pytest.approx(sum(answer.gaps_s) / 2)


async def test_answer_without_text_has_token_times(server: FakeOpenAI) -> None:
    server.chunks = completion("", "", "")
    answer = await answer_of(server)
    assert (answer.error, answer.text, answer.completion_tokens, len(answer.gaps_s)) == (None, "", 3, 2)


FAILURES = {
    "status": (503, [b'{"error": "no group"}'], "HTTP 503: .*no group"),
    "in-band": (200, [*completion("a")[:1], event({"error": {"message": "group lost"}})], "group lost"),
    "cut": (200, completion("a")[:1], "ended without"),
    "empty": (200, completion(), "no token"),
    "not-json": (200, [b"data: {oops\n\n"], "DecodeError"),
}


@pytest.mark.parametrize(("status", "chunks", "reason"), FAILURES.values(), ids=FAILURES)
async def test_failure_is_reported(server: FakeOpenAI, status: int, chunks: list[bytes], reason: str) -> None:
    server.status, server.chunks = status, chunks
    answer = await answer_of(server)
    assert answer.error is not None
    assert re.search(reason, answer.error)


async def test_unreachable_server_is_reported() -> None:
    async with session_for(1, None, 5.0) as session:
        answer = await stream_answer(session, "http://127.0.0.1:1/v1/completions", {})
    assert answer.error is not None
    assert "Connect" in answer.error


def arguments(server: FakeOpenAI, *more: str) -> list[str]:
    return ["--base-url", server.base_url, "--model", "m", "--concurrency", "4", "--num-requests", "12", *more]


async def test_a_run_sends_every_request_once_within_its_concurrency(server: FakeOpenAI) -> None:
    server.chunks = completion("a", "b")
    args = serve.parser().parse_args(arguments(server, "--input-len", "20", "--input-len-min", "5", "--ignore-eos"))
    figures = await serve.run(args)
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 14, "two to warm up, twelve to measure"
    assert {len(prompt.split()) for prompt in prompts} <= set(range(5, 21))
    assert 1 <= server.most_running <= 4
    assert (figures["num_requests"], figures["num_failed"], figures["output_tokens"]) == (12, 0, 24)
    body = server.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["stream"], body["ignore_eos"]) == (64, 0.0, True, True)


async def test_the_same_seed_gives_the_same_prompts(server: FakeOpenAI) -> None:
    server.chunks = chat("a", "b")
    args = serve.parser().parse_args(arguments(server, "--endpoint", "chat", "--warmup", "0", "--seed", "7"))
    for _ in range(2):
        await serve.run(args)
    sent = [json.dumps(body["messages"]) for body in server.bodies]
    assert sorted(sent[:12]) == sorted(sent[12:])
    assert "ignore_eos" not in server.bodies[0]


FIGURES = serve.measure([Answer(0.0, [1.0, 1.5, 2.0], ["a", "b", "c"], 2.5, 5, 3), Answer(0.0, [3.0], ["a"], 3.0, 5, 1)], 4.0)


def test_figures_follow_their_definitions() -> None:
    assert FIGURES["ttft_ms"] == {"mean": 2000, "p50": 2000, "p90": pytest.approx(2800), "p99": pytest.approx(2980)}
    assert FIGURES["tpot_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"), 500)
    assert FIGURES["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"), 500)
    assert (FIGURES["output_tokens_per_s"], FIGURES["requests_per_s"]) == (1.0, 0.5)
    assert "ttft ms" in serve.format_figures(FIGURES)


@pytest.mark.parametrize(("failed", "status"), [(False, 0), (True, 1)], ids=["good", "failed"])
def test_command_writes_json_and_exits_nonzero_on_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: bool, status: int
) -> None:
    async def run(args: object) -> dict[str, object]:
        return FIGURES | {"errors": ["HTTP 503"] if failed else []}

    argv = ["--base-url", "http://x", "--model", "m", "--api-key", "secret", "--json", str(tmp_path / "out.json")]
    assert serve.main(argv, run) == status
    written = (tmp_path / "out.json").read_text()
    assert json.loads(written)["settings"]["model"] == "m"
    assert "secret" not in written
    assert ("failed: HTTP 503" in capsys.readouterr().err) == failed


@pytest.mark.parametrize("flag", ["--concurrency", "--num-requests", "--input-len", "--output-len"])
def test_a_bad_flag_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.parser().parse_args(["--base-url", "http://x", "--model", "m", flag, "0"])
    assert caught.value.code == 2
    assert f"{flag}: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1.0], 99, 1.0), ([1.0, 2.0, 3.0], 50, 2.0), ([3.0, 1.0], 50, 2.0), ([0.0, 10.0], 90, 9.0)],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_nothing_has_no_percentile() -> None:
    assert all(math.isnan(value) for value in summary([]).values())


def test_ratio_is_the_geometric_mean_with_its_interval() -> None:
    ratio = mean_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio.middle == pytest.approx(4.0)
    assert ratio.low < 4.0 < ratio.high
    same = mean_ratio([3.0] * 40, [2.0] * 40)
    assert (same.low, same.middle, same.high) == pytest.approx((1.5, 1.5, 1.5))
    assert same.num_pairs == 40
    assert mean_ratio([3.0], [2.0]).high == math.inf


@pytest.mark.parametrize(
    ("ratio", "near"),
    [
        (Interval(1.4, 1.39, 1.41, 3), True),
        (Interval(3.0, 2.9, 3.1, 3), False),
        (Interval(3.0, 1.0, 9.0, 3), True),
        (Interval(1.2, 1.1, 1.3, 3), False),
    ],
    ids=["within-a-tenth", "far-above", "wide", "far-below"],
)
def test_more_pairs_are_wanted_near_the_bound(ratio: Interval, near: bool) -> None:
    assert ratio.is_near(1.5) == near


def test_a_table_is_aligned() -> None:
    assert table(["a", "b"], [["long", "1"], ["x", "22"]]) == "a      b\n----  --\nlong   1\nx     22"


def test_prompts_have_the_requested_lengths(tmp_path: Path) -> None:
    convert(TinyGguf().write(tmp_path / "tiny.gguf"), tmp_path / "model")
    lengths = spread_lengths(5, 8, 40)
    assert sorted(lengths) == [8, 16, 24, 32, 40]
    assert [len(ids) for ids in token_ids(tmp_path / "model", 0, lengths)] == lengths
    assert spread_lengths(1, 8, 40) == [8]
    assert all(0 <= id < len(vocabulary()[0]) for ids in token_ids(tmp_path / "model", 0, [50]) for id in ids)
    assert texts(1, 3, 4, 4) == texts(1, 3, 4, 4) != texts(2, 3, 4, 4)


def test_embeddings_apart_are_compared_with_those_at_once() -> None:
    parts = {
        name: Part([seconds] * 7, [seconds / 2] * 7, [0.01]) for name, seconds in zip(PARTS, (4.0, 2.0, 3.0, 4.0), strict=True)
    }
    *_, single, together = report(parts).splitlines()
    assert single == "| one by one / batch | 2.00 | 2.00 to 2.00 | 2.00 | 2.00 to 2.00 |"
    assert together == "| one after the other / at once | 1.25 | 1.25 to 1.25 | 1.25 | 1.25 to 1.25 |"
