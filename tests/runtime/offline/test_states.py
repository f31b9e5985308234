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


def test_a_rank_process_hits_snapshots(folder: Path) -> None:
    text = "a state of constant size per request, in addition to pages; " * 2
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    small = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with LLM(str(folder), dtype="float32", **small) as engine:
        outputs = [engine.generate(prompt, params)[0] for prompt in (text, text, text + "more")]
    streams = [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]
    assert compare([reference(folder, *stream) for stream in streams], [tokens for _, tokens in streams]).holds
    assert [output.num_cached_tokens for output in outputs] == [0, 112, 112]
