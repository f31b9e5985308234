"""A group of processes that keeps evicted pages in host memory."""

import os
from pathlib import Path
from typing import Any

import pytest

from phalanx_runtime import LLM, SamplingParams
from tests.runtime.tiny import save_tiny

ROOT = Path(__file__).parents[3]
PROMPTS = [f"prompt {i} " + "some more words of it " * 8 for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_repeated_prompts_load_more_pages_than_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens are those of the first time, when each page was computed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime")))
    folder = save_tiny(tmp_path / "model")
    with LLM(
        str(folder),
        dtype="float64",
        kv_cache_memory_bytes=1 << 19,
        host_cache_memory=4 << 20,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    ) as engine:
        first, second = engine.generate(PROMPTS, GREEDY), engine.generate(PROMPTS, GREEDY)
    assert [output.outputs for output in second] == [output.outputs for output in first]
    assert sum(output.num_cached_tokens for output in first) == 0
    pool_tokens = (1 << 19) // (2 * 3 * 2 * 16 * 8)
    assert sum(output.num_cached_tokens for output in second) > 2 * pool_tokens


def test_pages_and_parts_of_two_ranks_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have a window."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime")))
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    with LLM(
        str(save_tiny(tmp_path / "model", "gemma3_text", **layers)),
        dtype="float64",
        tensor_parallel_size=2,
        kv_cache_memory_bytes=1 << 19,
        host_cache_memory=4 << 20,
        max_model_len=256,
        max_num_batched_tokens=32,
        max_num_seqs=2,
    ) as engine:
        rounds = [engine.generate(PROMPTS, GREEDY) for _ in range(2)]
    assert all([output.outputs for output in outputs] == [output.outputs for output in rounds[0]] for outputs in rounds)
    cached = [sum(output.num_cached_tokens for output in outputs) for outputs in rounds]
    num_tokens = sum(len(output.prompt_token_ids) for output in rounds[0])
    assert cached[0] == 0 and cached[1] > 0.8 * num_tokens, cached


@pytest.mark.slow
def test_adaptive_tier_of_two_ranks_grows_for_repeated_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its floor it holds a sixth of the prompts, which are used in turn."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime")))
    with LLM(
        str(save_tiny(tmp_path / "model")),
        dtype="float64",
        tensor_parallel_size=2,
        kv_cache_memory_bytes=1 << 18,
        host_cache_memory=2 << 20,
        host_cache_adaptive=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    ) as engine:
        rounds = [engine.generate(PROMPTS, GREEDY) for _ in range(24)]
    assert all([output.outputs for output in outputs] == [output.outputs for output in rounds[0]] for outputs in rounds)
    cached = [sum(output.num_cached_tokens for output in outputs) for outputs in rounds]
    num_tokens = sum(len(output.prompt_token_ids) for output in rounds[0])
    assert max(cached[:4]) < 0.5 * num_tokens < 0.7 * num_tokens < cached[-1]
