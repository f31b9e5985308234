"""Log lines: JSON with the request's id, without contents of its body."""

import io
import json
import logging
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError
from phalanx_frontend.logs import TRACE_ID, JsonFormatter, LogFormat, TerminalFormatter, TextFormatter, make_formatter
from tests.frontend.fakes import FakeBackend

SECRET = "mellon-speak-friend"
DUMPED = """
import os, pathlib, resource, sys
from phalanx_frontend.logs import prevent_core_dumps
most = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (most, most))
pathlib.Path("/proc/self/coredump_filter").write_text("0x33")  # the default: a test may have changed that of its process
if sys.argv[1] == "yes":
    prevent_core_dumps()
prompt = "-".join(["mellon", "speak", "friend"])
os.abort()
"""
"""A program with a prompt in memory, which is aborted."""


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records]


def test_a_line_is_json_with_its_fields() -> None:
    record = logging.makeLogRecord(
        {"levelname": "INFO", "name": "here", "msg": "group %s", "args": ("serves",), "incarnation": 3}
    )
    line = json.loads(JsonFormatter().format(record))
    assert {**line, "time": ""} == {"time": "", "level": "INFO", "logger": "here", "message": "group serves", "incarnation": 3}
    assert line["time"].endswith("+00:00")


def test_a_text_line_ends_with_the_reason() -> None:
    """The supervisor reports the last line of a rank as the reason of its exit."""
    fields = {"levelname": "ERROR", "name": "here", "msg": "rank lost a peer", "why": "rank 1: timeout", "rank": 0}
    assert TextFormatter().format(logging.makeLogRecord(fields)) == "ERROR here rank lost a peer rank=0: rank 1: timeout"


def test_a_text_line_precedes_its_trace() -> None:
    error = ValueError("a bug")
    fields = {"levelname": "ERROR", "name": "here", "msg": "rank failed", "exc_info": (ValueError, error, None), "rank": 0}
    assert TextFormatter().format(logging.makeLogRecord(fields)) == "ERROR here rank failed rank=0\nValueError: a bug"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("phalanx_runtime.server", "WARNING group stopped incarnation=1: no model"),
        ("uvicorn.error", "WARNING uvicorn.error: group stopped incarnation=1: no model"),
    ],
)
def test_a_terminal_line_names_only_loggers_of_libraries(name: str, line: str) -> None:
    fields = {"levelname": "WARNING", "name": name, "msg": "group stopped", "incarnation": 1, "why": "no model"}
    written = TerminalFormatter().format(logging.makeLogRecord(fields))
    assert re.fullmatch(r"\d\d:\d\d:\d\d " + re.escape(line), written)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("log_format", "stream", "expected"),
    [
        ("auto", Terminal(), TerminalFormatter),
        ("auto", io.StringIO(), JsonFormatter),
        ("text", io.StringIO(), TerminalFormatter),
        ("json", Terminal(), JsonFormatter),
    ],
)
def test_lines_are_text_on_a_terminal(log_format: LogFormat, stream: io.StringIO, expected: type) -> None:
    assert type(make_formatter(log_format, stream)) is expected


@pytest.mark.parametrize(("own", "expected"), [({"trace_id": "b"}, "b"), ({"trace_id": ""}, None), ({}, "a")])
def test_a_line_has_the_trace_of_its_stream(own: dict[str, str], expected: str | None) -> None:
    """Served is the request of trace a; a line may be about another stream."""
    token = TRACE_ID.set(lambda: "a")
    try:
        line = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "move ended", **own})))
    finally:
        TRACE_ID.reset(token)
    assert line.get("trace_id") == expected


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (type(error), error, error.__traceback__), "what": object()})
    text = JsonFormatter().format(record)
    assert "\n" not in text and "ValueError: two\nlines" in json.loads(text)["trace"]


async def test_log_lines_contain_ids_and_no_request_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backend = FakeBackend()
    keys = ApiKeys([ApiKey("alice", f"sk-{SECRET}")])
    transport = httpx.ASGITransport(create_app(backend, keys=keys), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api-server", headers={"authorization": f"Bearer sk-{SECRET}"}
    ) as client:
        bodies: list[tuple[str, Any]] = [
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}),
            ("/v1/completions", {"prompt": SECRET, "stream": True, "max_tokens": 2}),
            ("/v1/completions", {"prompt": {SECRET: SECRET}}),
            ("/v1/completions", {"prompt": "x", "model": SECRET}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}),
            ("/v1/generate", {"prompt": SECRET, SECRET: 1}),
            ("/v1/batch", {"requests": [{"prompt": SECRET}, SECRET]}),
            ("/tokenize", {"prompt": SECRET}),
            (f"/{SECRET}", {}),
        ]
        for position, (path, body) in enumerate(bodies):
            await client.post(path, json=body, headers={"x-request-id": f"id-{position}"})
        backend.script = lambda request: [ValueError("a bug")]
        await client.post("/v1/completions", json={"prompt": SECRET}, headers={"x-request-id": "bug"})
        backend.script = lambda request: [BackendError(503, "gone", "no group")]
        await client.post("/v1/completions", json={"prompt": SECRET}, headers={"x-request-id": "gone"})
        await client.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode(), headers={"x-request-id": "cut"})
        await client.post("/v1/models", headers={"authorization": f"Bearer {SECRET}", "x-request-id": "eve"})
    own_lines = [line for line in lines(caplog) if str(line["logger"]).startswith("phalanx")]
    ended = [line for line in own_lines if line["message"] == "request ended"]
    assert [line["request_id"] for line in ended] == [*(f"id-{n}" for n in range(len(bodies))), "bug", "gone", "cut", "eve"]
    assert [line["status"] for line in ended] == [200, 200, 400, 404, 200, 400, 200, 200, 404, 500, 503, 400, 401]
    assert {line["api_key"] for line in ended} == {"alice", None}
    assert any(line["message"] == "request failed" and "trace" in line for line in own_lines)
    assert SECRET not in json.dumps(own_lines)


def writes_core_dumps() -> bool:
    """Whether the system writes whole core dumps into the folder of a process."""
    pattern = Path("/proc/sys/kernel/core_pattern")
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    return pattern.exists() and pattern.read_text().strip() == "core" and most == resource.RLIM_INFINITY


@pytest.mark.skipif(not writes_core_dumps(), reason="the system writes no whole core dump into the folder of a process")
def test_aborted_programs_dump_no_core(tmp_path: Path) -> None:
    def dump(is_prevented: str) -> list[bytes]:
        subprocess.run([sys.executable, "-c", DUMPED, is_prevented], cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)})
        return [core.read_bytes() for core in tmp_path.glob("core*")]

    assert dump("yes") == []
    assert [SECRET.encode() in core for core in dump("no")] == [True], "the test finds it"
