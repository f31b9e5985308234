"""A replayed trace has its own times, lengths and shared prefixes."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from bench.router.replay import Arrival, Replay, main, prompt_of, read_trace, replay

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
JSON = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 50, "hash_ids": [7, 8, 9]},
    {"timestamp": 3500, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 10]},
]


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_both_kinds_of_trace_are_read(tmp_path: Path) -> None:
    table = written(tmp_path, "a.csv", CSV)
    first, second = read_trace(table)
    assert first == Arrival(0, 374, 44) and (second.input_tokens, second.output_tokens) == (396, 109)
    assert second.at_s == pytest.approx(4.314579)
    lines = written(tmp_path, "b.jsonl", "\n".join(map(json.dumps, JSON)))
    assert list(read_trace(lines)) == [Arrival(0, 1030, 50, (7, 8, 9)), Arrival(2.5, 1500, 9, (7, 8, 10))]


@pytest.mark.parametrize(("name", "text"), [("a.csv", "x,y\n1,2\n"), ("b.jsonl", '{"timestamp": 1}\n')])
def test_unsuitable_file_is_refused_with_its_missing_columns(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ValueError, match="has no"):
        list(read_trace(written(tmp_path, name, text)))


def test_equal_blocks_begin_equal_prompts() -> None:
    first, second = (prompt_of(Arrival(0, n, 1, blocks), i, 1.0).split() for i, (n, blocks) in enumerate(LONG))
    assert [len(first), len(second)] == [1030, 1500]
    assert first[:1024] == second[:1024] and first[1024:1030] != second[1024:1030]
    assert len(prompt_of(Arrival(0, 1030, 1, (7, 8, 9)), 0, 0.1).split()) == 103
    alone = [prompt_of(Arrival(0, 50, 1), number, 1.0) for number in (0, 1)]
    assert alone[0] != alone[1]


LONG = [(1030, (7, 8, 9)), (1500, (7, 8, 10))]


async def test_requests_are_sent_at_their_times(unused_tcp_port: int) -> None:
    received: list[tuple[float, int]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        received.append((asyncio.get_running_loop().time(), body["max_tokens"]))
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    arrivals = [Arrival(2.0, 10, 40), Arrival(0.0, 10, 20)]
    url = f"http://127.0.0.1:{unused_tcp_port}/v1/completions"
    answers, duration_s, max_delay_s = await replay(Replay(url, "m", arrivals, speed=10, share=0.5))
    await runner.cleanup()
    assert [answer.error for answer in answers] == [None, None] and duration_s >= 0.2 and max_delay_s >= 0
    assert [tokens for _, tokens in received] == [10, 20], "the later one comes later"
    assert received[1][0] - received[0][0] > 0.1


def test_a_server_that_is_not_there_fails_the_run(
    tmp_path: Path, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = written(tmp_path, "a.csv", CSV), tmp_path / "out.json"
    where = ["--base-url", f"http://127.0.0.1:{unused_tcp_port}", "--model", "m", "--trace", str(trace), "--speed", "100"]
    assert main([*where, "--json", str(out)]) == 1
    assert json.loads(out.read_text())["num_failed"] == 2 and "num failed" in capsys.readouterr().out
