"""`phalanx-runtime serve` with two ranks and a tiny model on one machine."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.runtime.pods import is_alive
from tests.runtime.tiny import save_tiny

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def read_until(stderr: asyncio.StreamReader, pattern: str) -> re.Match[str]:
    """Reads lines up to the first match and returns it."""
    async with asyncio.timeout(120):
        while True:
            line = (await stderr.readline()).decode()
            assert line, f"the program ended before it wrote {pattern}"
            match = re.search(pattern, line)
            if match:
                return match


@pytest.mark.system  # imports torch four times: 20 s on two idle cores, a minute on busy ones
async def test_two_ranks_answer_equally_after_a_kill(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "phalanx_runtime", "serve", str(tmp_path / "tiny"), "--port", "0"),
        *("--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "1000000"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    try:
        port = (await read_until(process.stderr, r'"address": \["127.0.0.1", (\d+)\]'))[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            await read_until(process.stderr, '"group serves", "incarnation": 1')
            first = (await http.post("/v1/completions", json=BODY)).json()
            assert first["usage"]["completion_tokens"] == 8
            ranks = children(process.pid)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            await read_until(process.stderr, '"group serves", "incarnation": 2')
            again = (await http.post("/v1/completions", json=BODY)).json()
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
            ranks += children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.stderr.read()
        await process.wait()
    assert len(ranks) == 4
    assert not [rank for rank in ranks if is_alive(rank)]


def serve_command(model: Path) -> list[str]:
    return [sys.executable, "-m", "phalanx_runtime", "serve", str(model), "--port", "0"]


def environment(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **values}


def test_missing_model_ends_serve_with_its_reason(tmp_path: Path) -> None:
    ended = subprocess.run(serve_command(tmp_path), env=environment(), capture_output=True, text=True, timeout=120, check=False)
    errors = [line for line in map(json.loads, ended.stderr.splitlines()) if line["level"] == "ERROR"]
    assert ended.returncode == 1
    assert [line["message"] for line in errors] == ["the model cannot be served"]
    assert f"{tmp_path}" in errors[0]["why"] and "config.json" in errors[0]["why"]


def test_logs_of_a_terminal_are_text(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    with subprocess.Popen(serve_command(tmp_path), env=environment(), stderr=end) as process:
        os.close(end)
        text = read_terminal(terminal)
    assert process.returncode == 1
    assert re.fullmatch(r"\x1b\[K\d\d:\d\d:\d\d ERROR   the model cannot be served: .*config\.json.*", text.splitlines()[-1])


def read_terminal(terminal: int) -> str:
    """Returns what a program writes to its terminal until it ends."""
    written = b""
    try:
        while chunk := os.read(terminal, 4096):
            written += chunk
    except OSError:  # EIO: no process has the other end
        pass
    os.close(terminal)
    return written.decode()


async def test_pod_tries_a_missing_model_again(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *serve_command(tmp_path), stderr=asyncio.subprocess.PIPE, env=environment(PHALANX_POD_INDEX="0")
    )
    assert process.stderr is not None
    try:
        await read_until(process.stderr, "waiting 2 s before start 3 after: pod 0: .*config.json")
    finally:
        process.kill()
        await process.stderr.read()
        await process.wait()
