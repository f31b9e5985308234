"""A rank process serves a model that keeps a state per request."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from phalanx_runtime import LLM, SamplingParams
from tests.architectures.tiny import save_model
from tests.runtime.model.equal import Stream, compare
from tests.runtime.tiny import save_tokenizer

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    save_model(folder, "lfm2")
    save_tokenizer(folder)
    return folder


@torch.inference_mode()
def reference(folder: Path, prompt: list[int], output: list[int]) -> Stream:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    return Stream(logits.argmax(-1).tolist(), ((best[:, 0] - best[:, 1]) / logits.std(-1)).tolist())


@pytest.mark.slow
def test_a_rank_process_hits_snapshots(folder: Path) -> None:
    text = "a state of constant size per request, in addition to pages; " * 2
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    small = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with LLM(str(folder), dtype="float32", **small) as engine:
        outputs = [engine.generate(prompt, params)[0] for prompt in (text, text, text + "more")]
    streams = [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]
    assert compare([reference(folder, *stream) for stream in streams], [tokens for _, tokens in streams]).holds
    assert [output.num_cached_tokens for output in outputs] == [0, 112, 112]


@pytest.mark.slow
def test_restarted_ranks_read_pages_and_states(folder: Path, tmp_path: Path) -> None:
    """Of two ranks. The device holds two prompts of six."""
    texts = [f"{number}: " + "the states of its layers return from the disk " * 4 for number in range(6)]
    params, rounds = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), list[list[Any]]()
    small: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 16, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    disk: dict[str, Any] = {
        "max_model_len": 256,
        "host_cache_memory": 1 << 20,
        "disk_cache_path": str(tmp_path),
        "disk_cache_bytes": 32 << 20,
    }
    for num_rounds in (2, 1):
        with LLM(str(folder), dtype="float32", tensor_parallel_size=2, **small, **disk) as engine:
            rounds += [engine.generate(texts, params) for _ in range(num_rounds)]
    outputs = [[output.outputs for output in found] for found in rounds]
    assert outputs == [outputs[0]] * 3
    cached = [sum(output.num_cached_tokens for output in found) for found in rounds]
    assert cached[0] == 0 and cached[2] > 0, cached  # how many follows measured times: a busy machine computes most
    assert len(list(tmp_path.iterdir())) == 4, "each rank has a log of pages and one of states"
