"""The fuzzer: a short run of each kind, and the ways in which a case may fail."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from bench.fuzz.bodies import BODIES, GETS, STORED
from bench.fuzz.requests import RENEWED_CASES, Requests, make_app
from bench.fuzz.runner import run_kind, sleeps
from bench.fuzz.targets import case_random, kinds
from phalanx_frontend.app import NOT_SERVED
from tests.polling import wait_until

CASES = {"requests": 400, "sockets": 60, "gguf": 40, "safetensors": 150, "config": 150, "archive": 60, "tokenizer": 60}
CASES |= {"adapter": 120, "processor": 200, "tower": 60}
CASES |= {"integers": 200, "template": 40, "grammar": 100, "keys": 200, "image": 200, "batch": 200}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kinds())
def test_mutated_input_is_accepted_or_refused(kind: str, tmp_path: Path) -> None:
    with closing(kinds()[kind].open(tmp_path)) as target:
        outcomes = Counter(target.run(case_random(kind, 7, index)) for index in range(CASES[kind]))
    assert outcomes["accepted"] and outcomes["refused"] and outcomes.total() == CASES[kind]


def test_requests_attack_every_route(tmp_path: Path) -> None:
    app, _ = make_app(tmp_path)
    sent = [*BODIES, *(address.partition("?")[0] for address in GETS)]
    routes = [*app.openapi()["paths"], *NOT_SERVED]
    assert {"/v1/files", "/v1/load_lora_adapter", "/v1/responses/{response_id}/cancel"} <= {*routes}
    patterns = [re.sub("{[^}]*}", "[^/]+", route) for route in routes]
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, path) for path in sent)] == []


def test_files_of_the_server_are_renewed(tmp_path: Path) -> None:
    """Cases delete the stored file, and fill the store."""
    target, files = Requests(tmp_path), tmp_path / "files"
    (files / f"{STORED}.json").unlink()
    (files / "full.data").write_bytes(bytes(5000))
    for index in range(RENEWED_CASES):
        target.run(case_random("requests", 1, index))
    target.close()
    assert (files / f"{STORED}.json").exists() and not (files / "full.data").exists()


FAILED = [("gguf", 11, 3204), ("gguf", 11, 5674)]
FAILED += [("safetensors", 1795933054, index) for index in (7500, 67426, 72497)]
FAILED += [("adapter", 201, index) for index in (334, 426)]
FAILED += [("processor", 201, index) for index in (3, 60, 364, 375, 393, 501, 861)]
TAKEN_NOW = [("processor", 302, 2024), ("processor", 302, 3586), ("processor", 401, 17536)]
TAKEN_NOW += [("config", 1795932241, 5838)]
"""Settings that are no failure, with an image that was: another one is taken. And a Qwen3 without head_dim: it has a default."""


@pytest.mark.parametrize(("kind", "seed", "index"), FAILED)
def test_input_that_failed_is_answered(kind: str, seed: int, index: int, tmp_path: Path) -> None:
    with closing(kinds()[kind].open(tmp_path)) as target:
        assert target.run(case_random(kind, seed, index)) == "refused"


@pytest.mark.parametrize(("kind", "seed", "index"), TAKEN_NOW)
def test_input_that_failed_in_part_is_taken(kind: str, seed: int, index: int, tmp_path: Path) -> None:
    with closing(kinds()[kind].open(tmp_path)) as target:
        assert target.run(case_random(kind, seed, index)) == "accepted"


@pytest.mark.parametrize(
    ("way", "why"), [("wrong", "Defect: wrong answer"), ("crash", "SIGSEGV"), ("memory", "MemoryError"), ("exit", "status 3")]
)
def test_failing_case_is_counted_and_the_run_continues(way: str, why: str) -> None:
    totals = run_kind(way, 5, 6, child="tests.bench.fuzz_victims")
    assert why in totals.failures[0].why and totals.failures[0].replay == f"{way}:5:3"
    assert (totals.accepted, totals.refused, len(totals.failures)) == (3, 2, 1)


def test_child_that_sleeps_may_count_as_hanging() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        wait_until(lambda: sleeps(process.pid))
        process.kill()


@pytest.mark.parametrize("has_child", [False, True])
def test_child_that_computes_is_not_hanging(has_child: bool) -> None:
    busy = [sys.executable, "-c", "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"]
    command = [sys.executable, "-c", f"import subprocess; subprocess.run({busy!r})"] if has_child else busy
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        busy_pid = int(process.stdout.readline())
        assert not any(sleeps(process.pid) for _ in range(50))
        os.kill(busy_pid, signal.SIGKILL)
