"""A group of processes that keeps evicted pages in host memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx_runtime import LLM, SamplingParams
from phalanx_runtime.offline.records import RequestOutput
from tests.runtime.tiny import save_tiny

ROOT = Path(__file__).parents[3]
PROMPTS = [f"prompt {i} " + "some more words of it " * 8 for i in range(8)]
SLOW: dict[str, Any] = {"intermediate_size": 1024}
"""To compute a page takes much longer than to load it: groups load what is faster, by times that they measure."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@contextmanager
def engine_of(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine of other processes, whose device holds a part of `PROMPTS`."""
    small = {"dtype": "float64", "kv_cache_memory_bytes": 1 << 19, "max_model_len": 256, "max_num_batched_tokens": 64}
    with LLM(str(folder), **{**small, "max_num_seqs": 4, **settings}) as engine:
        yield engine


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime")))


def num_cached(outputs: list[RequestOutput]) -> int:
    return sum(output.num_cached_tokens for output in outputs)


def test_repeated_prompts_load_more_pages_than_the_pool(tmp_path: Path) -> None:
    """Their tokens are those of the first time, when each page was computed."""
    with engine_of(save_tiny(tmp_path / "model", **SLOW), host_cache_memory=4 << 20) as engine:
        first, second = engine.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, GREEDY)
    assert [output.outputs for output in second] == [output.outputs for output in first]
    assert num_cached(first) == 0
    pool_tokens = (1 << 19) // (2 * 3 * 2 * 16 * 8)
    assert num_cached(second) > 2 * pool_tokens


@pytest.mark.slow
def test_pages_and_parts_of_two_ranks_are_loaded(tmp_path: Path) -> None:
    """Some layers have a window. Without host memory the device has lost most prompts when they are repeated."""
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, **SLOW}
    folder, cached, outputs = save_tiny(tmp_path / "model", "gemma3_text", **layers), [], []
    for host_cache_memory in (None, 4 << 20):
        settings = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 18, "max_num_batched_tokens": 32, "max_num_seqs": 2}
        with engine_of(folder, host_cache_memory=host_cache_memory, **settings) as engine:
            rounds = [engine.generate(PROMPTS, GREEDY) for _ in range(2)]
        outputs += [[output.outputs for output in found] for found in rounds]
        cached.append(num_cached(rounds[1]))
    assert all(found == outputs[0] for found in outputs)
    assert cached[0] < cached[1], cached


@pytest.mark.slow
def test_restarted_ranks_read_pages_and_parts(tmp_path: Path) -> None:
    """Host memory has a share of the prompts, and none of them after the restart."""
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    folder, rounds = save_tiny(tmp_path / "model", "gemma3_text", **layers), list[list[RequestOutput]]()
    small = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 18, "max_num_batched_tokens": 32, "max_num_seqs": 2}
    for _ in range(2):
        disk = {"host_cache_memory": 1 << 20, "disk_cache_path": str(tmp_path / "pages"), "disk_cache_bytes": 32 << 20}
        with engine_of(folder, **small, **disk) as engine:
            rounds += [engine.generate(PROMPTS, GREEDY) for _ in range(3)]
    outputs = [[output.outputs for output in found] for found in rounds]
    assert all(found == outputs[0] for found in outputs)
    cached = [num_cached(found) for found in rounds]
    assert cached[0] == 0 and cached[3] > 0, cached  # how many follows measured times: a busy machine computes most
    assert len(list((tmp_path / "pages").iterdir())) == 4, "each rank has a log of pages and one of parts"


@pytest.mark.slow
def test_adaptive_tier_of_two_ranks_grows_for_repeated_prompts(tmp_path: Path) -> None:
    """At its floor it holds a sixth of the prompts, which are used in turn."""
    settings = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 18, "host_cache_memory": 2 << 20}
    with engine_of(save_tiny(tmp_path / "model"), host_cache_adaptive=True, **settings) as engine:
        rounds = [engine.generate(PROMPTS, GREEDY) for _ in range(24)]
    assert all([output.outputs for output in outputs] == [output.outputs for output in rounds[0]] for outputs in rounds)
    cached = [num_cached(outputs) for outputs in rounds]
    num_tokens = sum(len(output.prompt_token_ids) for output in rounds[0])
    assert max(cached[:4]) < 0.5 * num_tokens < 0.7 * num_tokens < cached[-1]
