"""A runtime with host and disk tier, as programs: prompts come back from host memory, and from disk after a kill."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.frame.programs import Program
from tests.polling import wait_until
from tests.runtime.tiny import save_tiny
from tests.slow_cases import some
from tests.system.runtimes import incarnation, metric_of, ranks_of, readiness, runtime

pytestmark = pytest.mark.system
PROMPTS = [f"{number} " * 300 for number in range(6)]


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Program]:
    with runtime("tiers", model, "--dtype", "float64", "--max-model-len", "900", *flags) as program:
        yield program


def answer(program: Program, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{program.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def mixed(model: Path) -> Path:
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return save_tiny(model.parent / "mixed", "gemma3_text", max_position_embeddings=2048, **layers)


@pytest.mark.parametrize(
    ("name", "ranks", "kv"),
    some([("model", "1", "int8"), ("model", "2", "auto"), ("mixed", "2", "auto")], ("mixed", "2", "auto")),
)
def test_killed_runtime_starts_with_the_pages_on_disk(
    tmp_path: Path, name: str, ranks: str, kv: str, request: pytest.FixtureRequest
) -> None:
    """First the ranks die, then the whole program. Pages of the mixed model have parts, for the layers with a window."""
    model, has_parts = request.getfixturevalue(name), name == "mixed"
    # of about two prompts; host memory has room for all
    pool = {"int8": "300000", "auto": "1200000" if has_parts else "1500000"}[kv]
    fixed = ("--tensor-parallel-size", ranks, "--kv-cache-dtype", kv, "--kv-cache-memory-bytes", pool)
    tiers = ("--host-cache-memory", "40000000", "--disk-cache-path", str(tmp_path / "pages"), *fixed)
    with serving(model, *fixed) as program:
        expected = [answer(program, prompt) for prompt in PROMPTS]
    with serving(model, *tiers) as program:
        assert [answer(program, prompt) for prompt in PROMPTS] == expected
        wait_until(lambda: metric_of(program, "phalanx_host_stored_pages_total") > 100)
        assert [answer(program, prompt) for prompt in PROMPTS] == expected
        assert metric_of(program, "phalanx_host_loaded_pages_total") > 0
        wait_until(lambda: metric_of(program, "phalanx_disk_cached_pages") > 100)
        for rank in ranks_of(program):
            os.kill(rank, signal.SIGKILL)
        wait_until(lambda: incarnation(program) > 1 and readiness(program).status_code == 200, 90)
        check_restored(program, expected, has_parts)
        for process in (program.process.pid, *ranks_of(program)):
            os.kill(process, signal.SIGKILL)
    with serving(model, *tiers) as program:
        check_restored(program, expected, has_parts)


def check_restored(program: Program, expected: list[str], has_parts: bool) -> None:
    """The prompts of a runtime that found its pages on disk."""
    assert [answer(program, prompt) for prompt in PROMPTS] == expected
    assert metric_of(program, "phalanx_disk_fetched_pages_total") > 0
    assert (metric_of(program, "phalanx_disk_fetched_window_parts_total") > 0) == has_parts
    assert metric_of(program, "phalanx_disk_cached_pages") > 100
    assert metric_of(program, "phalanx_page_leaks_total") == 0
