"""Adapters of the offline engine, whose ranks are real processes."""

import os
from pathlib import Path
from typing import Any

import pytest

from phalanx_runtime import LLM, SamplingParams
from tests.runtime.adapters import merge, save_adapter
from tests.runtime.tiny import save_tiny

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64}
PROMPTS = ["The king", "a", "Some more words", "The king"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "split", [{}, pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.system)]
)
def test_outputs_are_those_of_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: dict[str, Any]) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime")))
    base = save_tiny(tmp_path / "base")
    folders = [save_adapter(tmp_path / f"adapter{seed}", base, seed) for seed in range(2)]
    modules = [f"name{seed}={folder}" for seed, folder in enumerate(folders)]
    with LLM(str(base), enable_lora=True, max_loras=2, lora_modules=modules, **split, **OPTIONS) as engine:
        names = ["name0", None, "name1", "name1"]
        outputs = [one.outputs[0].token_ids for one in engine.generate(PROMPTS, GREEDY, adapters=names)]
        with pytest.raises(ValueError, match="The model `other` does not exist"):
            engine.generate("a", GREEDY, adapters=["other"])
        with pytest.raises(ValueError, match="1 adapters for 2 prompts"):
            engine.generate(["a", "b"], GREEDY, adapters=["name0"])
    for at, folder in ((0, folders[0]), (1, None), (2, folders[1]), (3, folders[1])):
        model = base if folder is None else merge(tmp_path / f"merged{at}", base, folder)
        with LLM(str(model), **OPTIONS) as engine:
            assert engine.generate(PROMPTS[at], GREEDY)[0].outputs[0].token_ids == outputs[at]
            if folder is not None:
                assert outputs[at] != outputs[1]
