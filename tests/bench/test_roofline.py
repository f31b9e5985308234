"""The model of the limit: sizes equal those of `transformers`, no step beats its ideal, gaps count per launch."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.roofline import MODELS, kernels, main, predict_decode, predict_prefill
from phalanx_api.roofline import PRODUCTS, shape_of, step_demand

H100 = PRODUCTS["h100"]
LLAMA = MODELS["llama-8b"]


@pytest.mark.parametrize("name", MODELS)
def test_linear_weights_equal_those_of_transformers(name: str) -> None:
    shape = replace(MODELS[name], layers=2)
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    linears = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.linear_weights == sum(linears)
    assert shape_of(config.to_dict()) == shape


@given(batch=st.integers(1, 512), context=st.integers(1, 32768), name=st.sampled_from(list(MODELS)))
def test_no_decode_beats_its_ideal(batch: int, context: int, name: str) -> None:
    made = predict_decode(MODELS[name], H100, batch, context)
    assert 0 < made.share <= 1
    assert sum(made.lost.values()) == pytest.approx(1 - made.share)
    assert predict_decode(MODELS[name], H100, batch, context + 1).seconds > made.seconds


@given(tokens=st.integers(1, 16384), name=st.sampled_from(list(MODELS)))
def test_no_prefill_beats_its_ideal(tokens: int, name: str) -> None:
    made = predict_prefill(MODELS[name], H100, tokens)
    assert 0 < made.share <= 1
    assert min(made.lost.values()) >= 0


def test_decode_reads_weights_and_contexts_once() -> None:
    parts = kernels(LLAMA, 4, [100] * 4, 4)
    assert sum(part.ideal_bytes for part in parts) == 2 * LLAMA.linear_weights + 400 * LLAMA.kv_bytes_per_token


@given(contexts=st.lists(st.integers(1, 4096), min_size=1, max_size=64), name=st.sampled_from(list(MODELS)))
def test_kernels_of_a_step_sum_to_its_demand(contexts: list[int], name: str) -> None:
    shape, batch = MODELS[name], len(contexts)
    parts = kernels(shape, batch, contexts, batch)
    demand = step_demand(shape, tokens=batch, num_logits=batch, keys_read=sum(contexts), token_keys=sum(contexts))
    assert sum(part.ideal_bytes for part in parts) == demand.bytes
    assert sum(part.flops for part in parts) == pytest.approx(demand.flops)


def test_launch_gap_counts_once_per_launch() -> None:
    launches = sum(part.launches for part in kernels(LLAMA, 1, [512], 1))
    added = predict_decode(LLAMA, H100, 1, 512, gap_s=1e-5).seconds - predict_decode(LLAMA, H100, 1, 512).seconds
    assert added == pytest.approx(launches * 1e-5)
    assert launches / LLAMA.layers <= 10


def test_command_prints_predictions_for_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-0.6b", "--device", "h200", "--batches", "1", "--contexts", "512", "--prefill", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("predictions, not measurements")
    assert [line.split()[0] for line in lines[3:5]] == ["decode", "prefill"]
    at = lines.index("share of the step that is lost to each kernel")
    kernel_names = [part.name for part in kernels(MODELS["qwen3-0.6b"], 1, [512], 1)]
    assert [line.rsplit(maxsplit=2)[0].strip() for line in lines[at + 3 :]] == kernel_names


def test_unknown_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "gpt-7"])
    assert "--model: gpt-7 is no file" in capsys.readouterr().err
