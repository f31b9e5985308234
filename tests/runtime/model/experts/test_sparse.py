"""Mixtures of experts on a CPU: routing, experts one by one, checkpoints, partition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.config import parse_config, read_json
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.experts.sparse import Expert, ExpertList, Routing, SparseMlp, choose_experts
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span, Stage, num_linear_weights, partition
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import as_bf16, generate, reference
from tests.runtime.ranks import Build, make_model_runner, with_group
from tests.runtime.tiny import save_tiny

HIDDEN, INNER = 12, 10


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class CountingLinear(DenseLinear):
    """Counts its calls and rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, None)
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return super().__call__(x)


def make_experts(count: int, span: Span, routing: Routing) -> tuple[ExpertList, list[CountingLinear]]:
    downs = [CountingLinear(noise(HIDDEN, INNER, seed=100 + i)) for i in range(count)]
    gates = [PlainGated(DenseLinear(noise(2 * INNER, HIDDEN, seed=i), None), "silu") for i in range(count)]
    experts = [Expert(gates[i], downs[i]) for i in range(span.start, span.stop)]
    return ExpertList(experts, span, routing), downs


def expected_sum(x: Tensor, logits: Tensor, span: Span, routing: Routing) -> Tensor:
    """Each token alone, in plain loops."""
    rows = []
    for token, row in zip(x, logits, strict=True):
        shares = torch.softmax(row, -1)
        chosen = sorted(range(len(row)), key=lambda i: -float(shares[i]))[: routing.per_token]
        divisor = sum(float(shares[i]) for i in chosen) if routing.norm_topk_prob else 1.0
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for i in chosen:
            if span.start <= i < span.stop:
                inner = gate(noise(2 * INNER, HIDDEN, seed=i) @ token, "silu")
                total += float(shares[i]) / divisor * (noise(HIDDEN, INNER, seed=100 + i) @ inner)
        rows.append(total)
    return torch.stack(rows)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(1, 9), tokens=st.integers(1, 12), norm_topk_prob=st.booleans(), seed=st.integers(0, 99))
def test_experts_equal_plain_loops(data: st.DataObject, count: int, tokens: int, norm_topk_prob: bool, seed: int) -> None:
    start = data.draw(st.integers(0, count))
    span = Span(start, data.draw(st.integers(start, count)))
    routing = Routing(per_token=data.draw(st.integers(1, count)), norm_topk_prob=norm_topk_prob)
    experts, _ = make_experts(count, span, routing)
    x, logits = noise(tokens, HIDDEN, seed=seed), noise(tokens, count, seed=seed + 1)
    expected = expected_sum(x, logits, span, routing)
    torch.testing.assert_close(experts(x, logits), expected)
    residual = noise(tokens, HIDDEN, seed=seed + 2)
    added = residual.clone()
    experts.add_to(added, x, logits)
    torch.testing.assert_close(added, residual + expected)


def test_rank_without_experts_adds_nothing() -> None:
    experts, _ = make_experts(4, Span(4, 4), Routing(per_token=2, norm_topk_prob=True))
    residual = noise(3, HIDDEN)
    experts.add_to(residual, noise(3, HIDDEN, seed=1), noise(3, 4))
    assert torch.equal(residual, noise(3, HIDDEN))


def test_only_experts_with_rows_compute() -> None:
    experts, downs = make_experts(6, Span(0, 6), Routing(per_token=2, norm_topk_prob=True))
    logits = torch.full((3, 6), -9.0, dtype=torch.float64)
    logits[0, [1, 4]], logits[1, [1, 2]], logits[2, [4, 1]] = (torch.tensor([2.0, 1.0], dtype=torch.float64) for _ in range(3))
    experts(noise(3, HIDDEN), logits)
    assert [down.rows for down in downs] == [[], [3], [1], [], [2], []]


def test_weights_are_shares_or_sum_to_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    shares = torch.softmax(logits, -1)[0, [1, 3]]
    plain = choose_experts(logits, Routing(per_token=2, norm_topk_prob=False))
    assert plain.experts.tolist() == [[1, 3]]
    torch.testing.assert_close(plain.weights[0], shares)
    torch.testing.assert_close(
        choose_experts(logits, Routing(per_token=2, norm_topk_prob=True)).weights[0], shares / shares.sum()
    )
    assert choose_experts(logits.bfloat16(), Routing(per_token=2, norm_topk_prob=True)).weights.dtype == torch.float32


def mlps(folder: Path, build: Build) -> list[Any]:
    def work(group: Any) -> list[Any]:
        model = make_model_runner(folder, group, build).model
        assert isinstance(model, Decoder)
        return [layer.down for layer in model.layers]

    return with_group([1], work)[0]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_compiled_kernels_compute_the_experts(tmp_path: Path, precision: Any) -> None:
    if library() is None:
        pytest.skip("no compiler here")
    folder = as_bf16(save_tiny(tmp_path / "model", "qwen3_moe"))
    first, dense, last = mlps(folder, Build(kernels=Kernels(compiled=True, precision=precision)))
    assert isinstance(dense, NativeLinear), "mlp_only_layers"
    for mlp in (first, last):
        assert isinstance(mlp, SparseMlp) and isinstance(mlp.experts, ExpertList)
        assert all(isinstance(one.gate_up, NativeGated) and isinstance(one.down, NativeLinear) for one in mlp.experts.experts)


def join_experts(folder: Path, block: str, names: tuple[str, str, str]) -> None:
    """Stores all experts of a layer in one tensor, as the modules of transformers 5 hold them."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    joined = {name: tensor for name, tensor in tensors.items() if f".{block}." not in name}
    for layer in range(3):
        old, new = f"model.layers.{layer}.{block}", f"model.layers.{layer}.mlp"
        gates, ups, downs = (torch.stack([tensors[f"{old}.experts.{i}.{part}.weight"] for i in range(4)]) for part in names)
        joined |= {f"{new}.experts.gate_up_proj": torch.cat((gates, ups), 1), f"{new}.experts.down_proj": downs}
        joined[f"{new}.gate.weight"] = tensors[f"{old}.gate.weight"]
    save_file(joined, path, {"format": "pt"})


@pytest.mark.parametrize("pods", [[1], [2]])
def test_experts_in_one_tensor_give_the_same_tokens(tmp_path: Path, pods: list[int]) -> None:
    folder = save_tiny(tmp_path / "model", "mixtral")
    outputs = generate(folder, pods, Build())
    assert compare(reference(folder, outputs), outputs).holds
    join_experts(folder, "block_sparse_moe", ("w1", "w3", "w2"))
    assert generate(folder, pods, Build()) == outputs


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "weights that are shares": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "experts in each second layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "one expert per token": ("mixtral", {"num_experts_per_tok": 1}),
    "sliding window": ("mixtral", {"sliding_window": 8}),
    "sliding window in use": ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}),
    "gpt-oss with windows in all layers": ("gpt_oss", {"layer_types": ["sliding_attention"] * 3}),
    "gpt-oss with four query heads per KV head": ("gpt_oss", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "odd columns": ("qwen3_moe", {"moe_intermediate_size": 21}),
}


@pytest.mark.parametrize(("family", "changes"), CHANGES.values(), ids=CHANGES.keys())
def test_variants_give_the_tokens_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_tiny(tmp_path / "model", family, **changes)
    outputs = generate(folder, [2], Build())
    assert compare(reference(folder, outputs), outputs).holds


def test_weights_of_experts_are_counted(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3_moe")
    config = parse_config(read_json(folder))
    sizes = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items() if tensor.ndim > 1}
    linear = sum(sizes.values()) - sizes["model.embed_tokens.weight"]
    assert num_linear_weights(config, partition(config, 1)[0]) == linear
    stages = [num_linear_weights(config, partition(config, 1)[0], Stage(i, 3)) for i in range(3)]
    assert sum(stages) == linear and stages[0] != stages[1]
    routers = 2 * 4 * 64
    assert sum(num_linear_weights(config, shard) for shard in partition(config, 2)) == linear + routers


BASE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 3,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({"num_experts": None}, "num_experts"),
    "too many per token": ({"num_experts_per_tok": 5}, "5 exceeds the 4 experts"),
    "layers that are no list": ({"mlp_only_layers": 3}, "mlp_only_layers"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_malformed_mixtures_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        parse_config({**BASE, **changes})


@pytest.mark.parametrize("field", ["swiglu_limit", "swiglu_alpha"])
def test_other_constants_of_swigluoai_are_refused(field: str) -> None:
    gpt_oss = {**BASE, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_key_value_heads": 4}
    assert parse_config({**gpt_oss, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}).activation == "swigluoai"
    with pytest.raises(ModelError, match=f"{field} must be"):
        parse_config({**gpt_oss, field: 5.0})


def test_swigluoai_limits_gate_and_up() -> None:
    values = torch.tensor([[-9.0, 2.0, 9.0, 1.0, -9.0, 9.0]])
    gates, up = torch.tensor([-9.0, 2.0, 7.0]), torch.tensor([1.0, -7.0, 7.0])
    torch.testing.assert_close(gate(values, "swigluoai")[0], (up + 1) * gates * torch.sigmoid(1.702 * gates))


def test_more_ranks_than_columns_are_refused() -> None:
    with pytest.raises(ModelError, match="4 exceeds the 3 columns"):
        partition(parse_config(BASE), 4)
