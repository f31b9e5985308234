"""`phalanx-runtime bench URL` against a real API server."""

import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx_frontend.app import create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.backend import BackendError
from tests.frontend.fakes import FakeBackend
from tests.frontend.serving import served_in_thread
from tests.polling import until
from tests.runtime.terminal.programs import command, environment, on_terminal, run

KEY = "mellon-speak-friend"
SMALL = ("--num-prompts", "6", "--num-warmups", "1", "--input-len", "5", "--output-len", "8")


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def url(backend: FakeBackend) -> Iterator[str]:
    with served_in_thread(create_app(backend, keys=ApiKeys([ApiKey("people", KEY)]))) as address:
        yield address


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_figures_count_every_request_and_token(backend: FakeBackend, url: str, tmp_path: Path, endpoint: str) -> None:
    file = tmp_path / "figures.json"
    ended = run("bench", url, "--endpoint", endpoint, "--json", str(file), *SMALL, OPENAI_API_KEY=KEY)
    assert (ended.returncode, ended.stderr) == (0, "")
    written = json.loads(file.read_text())
    [figures] = written["runs"]
    assert (figures["num_requests"], figures["num_failed"], figures["output_tokens"]) == (6, 0, 48)
    assert figures["prompt_tokens"] == sum(len(request.prompt) for request in backend.requests[1:])
    assert len({tuple(request.prompt) for request in backend.requests}) == 7
    assert 0 < figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"] <= figures["e2e_ms"]["p99"]
    assert "goodput_requests_per_s" not in figures
    assert (written["settings"]["model"], written["settings"]["request_rate"]) == ("tiny", ["unlimited"])
    assert KEY not in file.read_text()
    for name in ("latency", "ttft ms", "tpot ms", "itl ms", "p50", "p90", "p99", "output tokens per s"):
        assert name in ended.stdout


def test_each_rate_is_measured_with_its_goodput(backend: FakeBackend, url: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    rates = ("--request-rate", "200", "inf", "--slo-ttft", "60000", "--slo-itl", "60000")
    ended = run("bench", url, *rates, "--json", str(file), *SMALL, OPENAI_API_KEY=KEY)
    runs = json.loads(file.read_text())["runs"]
    assert [one["request_rate"] for one in runs] == ["200/s", "unlimited"]
    assert [one["goodput_requests_per_s"] for one in runs] == [one["requests_per_s"] for one in runs]
    assert [line.split()[0] for line in ended.stdout.splitlines()[-2:]] == ["200/s", "unlimited"]
    assert len({tuple(request.prompt) for request in backend.requests}) == 13
    late = run("bench", url, "--slo-ttft", "0.000001", "--json", str(file), *SMALL, OPENAI_API_KEY=KEY)
    assert (late.returncode, json.loads(file.read_text())["runs"][0]["goodput_requests_per_s"]) == (0, 0.0)


def pixels_of(png: bytes) -> tuple[int, int, bytes]:
    """Returns width, height and the filtered rows of a PNG, whose checksums it checks."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, size, data = 8, (0, 0), b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + content),)
        if kind == b"IHDR":
            size = struct.unpack(">II", content[:8])
        data += content if kind == b"IDAT" else b""
        at += 12 + length
    assert kind == b"IEND"
    return *size, zlib.decompress(data)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_an_image(url: str, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plot{suffix}"
    assert run("bench", url, "--plot", str(file), *SMALL, OPENAI_API_KEY=KEY).returncode == 0
    if suffix == ".svg":
        texts = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
        assert {"TTFT, ms", "TPOT, ms", "ITL, ms", "unlimited", "100%"} <= set(texts)
        return
    width, height, rows = pixels_of(file.read_bytes())
    assert len(rows) == height * (3 * width + 1)
    assert rows.count(bytes.fromhex("1f6f8b")) > 100, "the lines"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "other"], "failed: HTTP 404: The model `other` does not exist"),
        ([], "HTTP 401: "),
    ],
)
def test_failures_are_named(url: str, arguments: list[str], reason: str) -> None:
    key = {"OPENAI_API_KEY": KEY} if arguments else {}
    ended = run("bench", url, *arguments, *SMALL, **key)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"phalanx-runtime bench: {reason}") and ended.stderr.count("\n") == 1


def test_a_broken_stream_counts_as_failed(tmp_path: Path) -> None:
    """An error after the first event arrives within the stream."""
    backend = FakeBackend()
    script = backend.script
    backend.script = lambda request: [*list(script(request))[:3], BackendError(503, "lost", "the group is lost")]
    file = tmp_path / "figures.json"
    with served_in_thread(create_app(backend)) as url:
        ended = run("bench", url, "--json", str(file), *SMALL)
    assert ended.returncode == 1 and "the group is lost" in ended.stderr
    assert json.loads(file.read_text())["runs"][0]["num_failed"] == 6


def test_figures_without_samples_are_null(tmp_path: Path) -> None:
    """One token has no second one, and NaN is no JSON."""
    file = tmp_path / "figures.json"
    with served_in_thread(create_app(FakeBackend())) as url:
        assert run("bench", url, "--json", str(file), *SMALL, "--output-len", "1").returncode == 0
    [figures] = json.loads(file.read_text(), parse_constant=pytest.fail)["runs"]
    assert figures["itl_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None} and figures["ttft_ms"]["p50"] > 0


async def test_ctrl_c_ends_a_bench_without_a_trace() -> None:
    """The fake hangs after five tokens of a request for more than 200."""
    backend, flags = FakeBackend(), (*SMALL, "--output-len", "201")
    with served_in_thread(create_app(backend)) as url, on_terminal("bench", url, *flags) as (terminal, process):
        await until(lambda: len(backend.requests) > 0)
        terminal.write("\x03")
        assert "Traceback" not in terminal.read_all() and process.wait(60) == 130


def test_output_that_nothing_reads_ends_quietly() -> None:
    program = subprocess.Popen(command("completion", "bash"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.close()
    assert (program.communicate()[1], program.returncode) == (b"", 141)


def test_a_plot_needs_a_known_suffix() -> None:
    ended = run("bench", "http://127.0.0.1:9", "--plot", "plot.gif")
    assert ended.returncode == 2 and "'plot.gif' ends in neither .png nor .svg" in ended.stderr
