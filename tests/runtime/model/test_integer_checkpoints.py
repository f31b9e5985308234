"""Checkpoints in integers give the tokens of their dequantised weights, at each number of ranks; others are refused by name."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx_runtime.checkpoint.quantization import parse_quantization
from phalanx_runtime.checkpoint.schemes.integers import IntScheme
from phalanx_runtime.checkpoint.vision import text_config
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.experts.load import StoredExpert
from phalanx_runtime.model.generic.split import Cut
from phalanx_runtime.model.generic.stored import StoredMatrix, StoredWeights
from phalanx_runtime.model.linear.gpu import ArrangedLinear, PackedTritonLinear
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.linear.linear import DenseLinear
from phalanx_runtime.model.linear.registry import Kernels, make_linear
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.stored.matrices import MatrixReader, check_scheme
from phalanx_runtime.model.weights import Checkpoint
from tests.runtime.model.equal import compare
from tests.runtime.model.integer_checkpoints import KINDS, Kind, Quantised, quantise, save_integers, stored_tensors
from tests.runtime.model.reference import generate, reference
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
SHAPE = (72, 152)
"""The last group of 32 inputs is smaller."""


def check_tokens(tmp_path: Path, family: str, kind: Kind, groups: list[tuple[int, int]], **changes: Any) -> None:
    """Compares each group, of (tensor-parallel, pipeline-parallel) size, with `transformers` on the dequantised weights."""
    folder, exact = tmp_path / "integers", tmp_path / "exact"
    save_integers(save_tiny(tmp_path / "model", family, **changes), folder, exact, kind)
    for ranks, stages in groups:
        outputs = generate(folder, [ranks * stages], Build(stages=stages))
        assert compare(reference(exact, outputs), outputs).holds, (ranks, stages)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    check_tokens(tmp_path, "qwen3", KINDS[name], [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])


@pytest.mark.parametrize("is_parallel", [False, True], ids=["columns", "whole experts"])
def test_experts_keep_their_codes(tmp_path: Path, *, is_parallel: bool) -> None:
    compiled("native")
    folder, exact = tmp_path / "integers", tmp_path / "exact"
    save_integers(save_tiny(tmp_path / "model", "qwen3_moe"), folder, exact, KINDS["gptq order"])
    for ranks in (1, 2, 4):
        build = Build(kernels=Kernels(compiled=True), has_parallel_experts=is_parallel)
        outputs = generate(folder, [ranks], build)
        assert compare(reference(exact, outputs), outputs).holds, ranks


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2_moe", "w4 groups"), ("qwen2_moe", "gptq order"), ("deepseek_v3", "awq"), ("qwen2", "int8 channel")],
)
def test_models_of_transformers_read_integers(tmp_path: Path, family: str, kind: str) -> None:
    """With biases in attention, and experts."""
    folder, exact = tmp_path / "integers", tmp_path / "exact"
    save_integers(save_tiny(tmp_path / "model", family), folder, exact, KINDS[kind])
    compiled("native")
    for ranks, stages in ((1, 1), (2, 1), (1, 2)):
        build = Build(stages=stages, level="transformers", kernels=Kernels(compiled=True))
        outputs = generate(folder, [ranks * stages], build, chunk=7)
        assert compare(reference(exact, outputs), outputs).holds, (ranks, stages)


def test_weights_without_a_linear_are_refused(tmp_path: Path) -> None:
    folder, kind, router = tmp_path / "integers", KINDS["awq"], "model.layers.1.mlp.gate"
    save_integers(save_tiny(tmp_path / "model", "qwen2_moe"), folder, tmp_path / "exact", kind)
    tensors = load_file(folder / "model.safetensors")
    packed = stored_tensors(router, quantise(tensors.pop(f"{router}.weight"), kind), kind)
    save_file({**tensors, **packed}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"AWQ, .*: {router}.weight is quantised, and no linear"):
        generate(folder, [1], Build())


def test_a_parameter_of_several_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.conversion_mapping as mapping
    from transformers.core_model_loading import Concatenate, WeightConverter

    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    converter = WeightConverter(parts, "mlp.gate_up_proj.weight", operations=[Concatenate(dim=0)])
    source = save_tiny(tmp_path / "model", "phi3")
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda _: [converter])
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "gate_up" in name]:
        halves = tensors.pop(name).chunk(2)
        tensors |= {name.replace("gate_up", kind): half.clone() for kind, half in zip(("gate", "up"), halves, strict=True)}
    save_file(tensors, source / "model.safetensors")
    save_integers(source, tmp_path / "integers", tmp_path / "exact", KINDS["awq"])
    reason = r"AWQ, .*: model.layers.0.mlp.gate_up_proj.weight is made of several quantised weights"
    with pytest.raises(ModelError, match=reason):
        generate(tmp_path / "integers", [1], Build(level="transformers"))


class Router(nn.Linear):
    """As those of Llama 4: a linear whose result is another one than a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[StoredWeights]:
    """Those of a folder with the linear `w`, of `SHAPE`."""
    kind = KINDS["awq"]
    save_file(stored_tensors("w", quantise(torch.randn(SHAPE), kind), kind), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        yield StoredWeights(checkpoint, scheme_of(kind.config), Kernels(compiled=True))


def test_linears_with_another_forward_pass_are_refused(weights: StoredWeights) -> None:
    model = nn.ModuleDict({"w": Router(SHAPE[1], SHAPE[0])})
    with pytest.raises(ModelError, match=r"w.weight is quantised, and no linear"):
        weights.linear(model, "w.weight", "w.weight", SHAPE, None)


def test_inputs_of_another_size_are_refused(weights: StoredWeights) -> None:
    """A kernel would read beyond its weights."""
    model = nn.ModuleDict({"w": nn.Linear(SHAPE[1], SHAPE[0], bias=False)})
    weights.linear(model, "w.weight", "w.weight", SHAPE, Cut(-1, (Span(0, 64),)))
    assert model["w"](torch.ones(3, 64)).shape == (3, SHAPE[0])
    with pytest.raises(ModelError, match=rf"w.weight has 64 quantised inputs, and is multiplied with {SHAPE[1]}"):
        model["w"](torch.ones(3, SHAPE[1]))


def test_another_product_with_quantised_experts_is_refused() -> None:
    matrix: Any = StoredMatrix(DenseLinear(torch.eye(4), None), 4)
    assert torch.equal(F.linear(torch.ones(2, 4), matrix), torch.ones(2, 4))
    with pytest.raises(ModelError, match="an expert has 4 quantised inputs, and is multiplied with 3"):
        F.linear(torch.ones(2, 3), matrix)
    with pytest.raises(ModelError, match="its experts are quantised, and multiplied by matmul"):
        torch.ones(2, 4) @ matrix


def test_experts_of_other_devices_are_dequantised(tmp_path: Path) -> None:
    kind = KINDS["awq"]
    parts = [quantise(torch.randn(SHAPE), kind) for _ in range(2)]
    tensors = stored_tensors("a", parts[0], kind) | stored_tensors("b", parts[1], kind)
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        reader, rows = MatrixReader(checkpoint, scheme_of(kind.config)), Span(0, SHAPE[0])
        expert = StoredExpert(
            gate_up=reader.rows([("a", SHAPE[0], rows)], SHAPE[1]), down=reader.columns("b", SHAPE, Span(8, 72))
        )
    dense = expert.dequantize(torch.float32)
    assert isinstance(dense.gate_up, torch.Tensor) and isinstance(dense.down, torch.Tensor)
    assert torch.equal(dense.gate_up, parts[0].exact) and torch.equal(dense.down, parts[1].exact[:, 8:72])


def test_biases_and_uneven_heads_are_cut(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
    check_tokens(tmp_path, "llama", KINDS["awq"], [(1, 1), (2, 1)], attention_bias=True, mlp_bias=True, **shape)


def test_loading_names_the_scheme(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
        check_tokens(tmp_path, "llama", KINDS["gptq order"], [(1, 1)], num_hidden_layers=1)
    found = [vars(record) for record in caplog.records if record.message == "quantised checkpoint"]
    names = [(record["scheme"], record["loaded_as"]) for record in found]
    assert names == [("GPTQ, 4 bits in groups of 32 inputs, by activation order", "4 bits")]


@pytest.mark.parametrize(
    ("kind", "loaded_as"),
    [
        (Kind(layout="gptq", group=128), "4 bits"),
        (Kind(layout="awq", group=32), "4 bits"),
        (Kind(layout="gptq", group=128, is_ordered=True), "4 bits"),
        (Kind(layout="gptq", group=8), "torch.bfloat16"),
        (Kind(layout="pack-quantized"), "4 bits"),
        (Kind(layout="pack-quantized", bits=8), "8 bits"),
        (Kind(layout="pack-quantized", bits=8, group=128, strategy="group"), "8 bits"),
    ],
    ids=["groups", "small groups", "order", "tiny groups", "rows", "bytes", "groups of bytes"],
)
def test_loading_says_what_a_gpu_keeps_packed(kind: Kind, loaded_as: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
        check_scheme(scheme_of(kind.config), Kernels(triton=True), torch.bfloat16, torch.device("cuda"))
    assert [vars(record)["loaded_as"] for record in caplog.records] == [loaded_as]


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, IntScheme, Quantised]:
    """A folder with the linear `w`, its scheme and its codes."""
    folder, kind = tmp_path_factory.mktemp("weights"), KINDS[request.param]
    quantised = quantise(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), kind)
    save_file(stored_tensors("w", quantised, kind), folder / "model.safetensors")
    return folder, scheme_of(kind.config), quantised


def scheme_of(config: Any) -> IntScheme:
    """Returns the integer scheme of a config."""
    scheme = parse_quantization({"quantization_config": config})
    assert isinstance(scheme, IntScheme)
    return scheme


def test_config_of_2024_names_the_scheme_too() -> None:
    config = KINDS["int8 channel"].config
    assert parse_quantization({"compression_config": config, "quantization_config": {}}) == scheme_of(config)
    part = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    assert parse_quantization(text_config({**part, "compression_config": config})) == scheme_of(config)


def test_gpus_pack_only_codes_that_the_scheme_promises(stored: tuple[Path, IntScheme, Quantised]) -> None:
    folder, scheme, _ = stored
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        weight = MatrixReader(checkpoint, scheme).columns("w", SHAPE, Span(0, SHAPE[1]))
    assert isinstance(weight, IntWeight)
    linear = make_linear(replace(weight, scales=weight.scales.bfloat16()), None, Kernels(triton=True))
    assert isinstance(linear, PackedTritonLinear | ArrangedLinear) == scheme.has_gpu_format


@settings(max_examples=25)
@given(data=st.data())
def test_any_part_is_exact(stored: tuple[Path, IntScheme, Quantised], data: st.DataObject) -> None:
    folder, scheme, quantised = stored
    axis = data.draw(st.sampled_from([0, 1]))
    start = data.draw(st.integers(0, SHAPE[axis] - 1))
    span = Span(start, data.draw(st.integers(start + 1, SHAPE[axis])))
    with Checkpoint(folder, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, scheme)
        part = reader.columns("w", SHAPE, span) if axis else reader.rows([("w", SHAPE[0], span)] * 2, SHAPE[1])
    exact = quantised.exact
    expected = exact[:, span.start : span.stop] if axis else torch.cat([exact[span.start : span.stop]] * 2)
    assert isinstance(part, IntWeight) and part.scales.dtype == quantised.scales.dtype
    assert torch.equal(part.dequantize(torch.float32), expected)
    assert torch.equal(part.dequantize(torch.bfloat16), expected.bfloat16())


def test_largest_zero_point_of_gptq_means_zero(tmp_path: Path) -> None:
    kind = KINDS["gptq order"]
    quantised = quantise(torch.rand(SHAPE) + 0.1, kind)
    assert bool((quantised.zeros == 0).all())
    save_file(stored_tensors("w", quantised, kind), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        part = MatrixReader(checkpoint, scheme_of(kind.config)).columns("w", SHAPE, Span(0, SHAPE[1]))
    assert isinstance(part, IntWeight) and torch.equal(part.dequantize(torch.float32), quantised.exact)


def test_mix_with_other_weights_or_groups_is_joined(tmp_path: Path) -> None:
    kind, other = KINDS["gptq order"], torch.randn(6, SHAPE[1])
    parts = [quantise(torch.randn(SHAPE), kind) for _ in range(2)]
    tensors = {**stored_tensors("w", parts[0], kind), **stored_tensors("v", parts[1], kind), "u.weight": other}
    tensors["v.g_idx"] = tensors["v.g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    turned = Quantised(parts[1].codes, parts[1].scales, parts[1].zeros, parts[1].groups.flip(0))
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        reader, rows = MatrixReader(checkpoint, scheme_of(kind.config)), Span(0, SHAPE[0])
        both = [reader.rows([("w", SHAPE[0], rows), last], SHAPE[1]) for last in (("v", SHAPE[0], rows), ("u", 6, Span(2, 6)))]
    for joined, expected in zip(both, (turned.exact, other[2:]), strict=True):
        dense = joined if isinstance(joined, torch.Tensor) else joined.dequantize(torch.float32)
        assert torch.equal(dense, torch.cat([parts[0].exact, expected]))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("gptq", {"scales": None}, "tensor w.scales is missing"),
        ("gptq", {"scales": torch.ones(4, 72)}, r"w.scales has shape \[4, 72\]; GPTQ, 4 bits in groups of 32 inputs implies"),
        ("gptq", {"qzeros": torch.zeros(5, 9)}, "w.qzeros is stored as F32; .* implies I32"),
        ("gptq", {"qweight": torch.zeros(18, 72, dtype=torch.int32)}, r"w.qweight has shape \[18, 72\]"),
        ("gptq order", {"g_idx": None}, "w.g_idx is missing: GPTQ, 4 bits .* needs the group of each input"),
        ("w4 order", {"weight_g_idx": None}, "w.weight_g_idx is missing: compressed-tensors .* needs the group of each input"),
        ("gptq order", {"g_idx": torch.full((152,), 5, dtype=torch.int32)}, "w.g_idx has groups outside of 0 to 4"),
        ("w4 groups", {"weight_shape": torch.tensor([72, 150])}, r"weight_shape is \[72, 150\]; config.json implies \[72, 152\]"),
        ("w4 zeros", {"weight_zero_point": None}, "tensor w.weight_zero_point is missing"),
        ("int8 channel", {"weight_scale": torch.ones(72, 2)}, r"w.weight_scale has shape \[72, 2\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, kind: str, change: Mapping[str, Any], reason: str) -> None:
    tensors: dict[str, Any] = stored_tensors("w", quantise(torch.randn(SHAPE), KINDS[kind]), KINDS[kind])
    tensors |= {f"w.{suffix}": tensor for suffix, tensor in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint, pytest.raises(ModelError, match=reason):
        MatrixReader(checkpoint, scheme_of(KINDS[kind].config)).columns("w", SHAPE, Span(0, 152))


def test_groups_that_were_never_computed_are_contiguous(tmp_path: Path) -> None:
    kind = KINDS["w4 groups"]
    quantised = quantise(torch.randn(SHAPE), kind)
    unset = {"w.weight_g_idx": torch.full((152,), -1, dtype=torch.int32)}
    save_file({**stored_tensors("w", quantised, kind), **unset}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        part = MatrixReader(checkpoint, scheme_of(KINDS["w4 order"].config)).columns("w", SHAPE, Span(0, 152))
    assert isinstance(part, IntWeight) and torch.equal(part.dequantize(torch.float32), quantised.exact)


def test_stored_groups_are_read_without_desc_act(tmp_path: Path) -> None:
    kind = KINDS["gptq order"]
    quantised = quantise(torch.randn(SHAPE), kind)
    save_file(stored_tensors("w", quantised, kind), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
        reader = MatrixReader(checkpoint, scheme_of({**kind.config, "desc_act": False}))
        part = reader.columns("w", SHAPE, Span(0, 152))
    assert isinstance(part, IntWeight) and torch.equal(part.dequantize(torch.float32), quantised.exact)


def test_checkpoint_formats_have_two_names() -> None:
    for form in ("gptq", "gptq_v2"):
        assert scheme_of({**GPTQ, "checkpoint_format": None, "format": form}) == scheme_of({**GPTQ, "checkpoint_format": form})
    assert scheme_of({**AWQ, "format": "GEMM", "backend": "autoawq"}) == scheme_of(AWQ)


GPTQ, AWQ, PACKED = KINDS["gptq"].config, KINDS["awq"].config, KINDS["w4 groups"].config


def packed(form: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    weights = {**PACKED["config_groups"]["group_0"]["weights"], **changes}
    return {**PACKED, "format": form, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GPTQ, "bits": 3}, "gptq of 3 bits is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq in checkpoint_format marlin is not supported"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"the rule '\+:.\*down.\*' of dynamic is not supported"),
        ({**GPTQ, "group_size": 0}, "group_size 0 is not supported"),
        ({**GPTQ, "checkpoint_format": "", "format": "marlin"}, "gptq in checkpoint_format marlin is not supported"),
        ({**GPTQ, "format": "bitblas"}, "gptq in format 'bitblas' is not supported: use gptq"),
        ({**GPTQ, "backend": "marlin"}, "gptq of backend 'marlin' is not supported"),
        ({**AWQ, "format": "gemv_fast"}, "awq in format 'gemv_fast' is not supported: use gemm"),
        ({**AWQ, "backend": "llm-awq"}, "awq of backend 'llm-awq' is not supported"),
        ({**AWQ, "version": "gemv"}, "awq version gemv is not supported"),
        ({**AWQ, "bits": 3}, "awq of 3 bits is not supported"),
        ({**AWQ, "zero_point": False}, "awq without zero_point is not supported"),
        (packed(num_bits=2), r"2 bits \(int\) by group are not supported in pack-quantized: use 4 or 8 bits"),
        (packed(type="float"), r"4 bits \(float\) by group are not supported"),
        (packed("int-quantized"), r"4 bits \(int\) by group are not supported in int-quantized"),
        (packed(actorder="other"), "actorder 'other' is not supported"),
        (packed(group_size=None), "strategy group without group_size"),
        (packed("mxfp4-pack-quantized"), "compressed-tensors mxfp4-pack-quantized is not supported"),
        (packed("mixed-precision"), "compressed-tensors mixed-precision is not supported"),
        (
            {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config of compressed-tensors is not supported",
        ),
        (
            {**PACKED, "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config of compressed-tensors is not supported",
        ),
        ({"quant_method": "modelopt"}, "modelopt is not supported"),
    ],
)
def test_other_schemes_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        parse_quantization({"quantization_config": config})


def test_several_schemes_in_a_checkpoint_are_refused() -> None:
    groups = {"a": PACKED["config_groups"]["group_0"], "b": packed(group_size=64)["config_groups"]["group_0"]}
    with pytest.raises(ModelError, match=r"several schemes are not supported.*groups of 32 inputs.*groups of 64 inputs"):
        parse_quantization({"quantization_config": {**PACKED, "config_groups": groups}})
    groups["b"] = {**groups["a"], "format": "int-quantized"}
    with pytest.raises(ModelError, match="pack-quantized with groups in int-quantized is not supported"):
        parse_quantization({"quantization_config": {**PACKED, "config_groups": groups}})


def test_rules_that_leave_layers_unquantised_are_accepted() -> None:
    assert scheme_of({**GPTQ, "dynamic": {"-:.*lm_head": {}}}) == scheme_of(GPTQ)
    assert scheme_of({**AWQ, "modules_to_not_convert": ["lm_head"]}) == scheme_of(AWQ)
    assert scheme_of({**PACKED, "sparsity_config": {"format": "dense"}, "transform_config": {}}) == scheme_of(PACKED)


@pytest.mark.parametrize("precision", ["int4", "fp8"])
def test_integer_checkpoint_is_not_rounded_again(tmp_path: Path, precision: Any) -> None:
    folder = tmp_path / "integers"
    save_integers(save_tiny(tmp_path / "model", num_hidden_layers=1), folder, tmp_path / "exact", KINDS["awq"])
    with pytest.raises(ModelError, match=f"{precision}: the checkpoint is quantised already, AWQ"):
        generate(folder, [1], Build(kernels=Kernels(precision=precision)))


def test_codes_without_a_config_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "integers"
    save_integers(save_tiny(tmp_path / "model", num_hidden_layers=1), folder, tmp_path / "exact", KINDS["awq"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "model.layers.0.mlp.down_proj.qweight" in load_file(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj.weight is missing"):
        generate(folder, [1], Build())


@pytest.mark.parametrize("name", ["w4 zeros", "w4 order", "awq", "gptq order", "w8 groups", "int8 channel"])
def test_kernels_compute_codes_in_every_group(tmp_path: Path, name: str) -> None:
    compiled("native")
    folder, exact = tmp_path / "integers", tmp_path / "exact"
    save_integers(save_tiny(tmp_path / "model", "qwen3"), folder, exact, KINDS[name])
    for ranks, stages in [(1, 1), (2, 1), (4, 1), (1, 2)]:
        outputs = generate(folder, [ranks * stages], Build(stages=stages, kernels=Kernels(compiled=True)))
        assert compare(reference(exact, outputs), outputs).holds, (ranks, stages)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", name) for name in ("w4 zeros", "awq", "gptq", "w8 channel", "int8 channel")] + [("qwen2_moe", "awq")],
)
def test_loaded_weights_take_the_memory_of_the_file(tmp_path: Path, family: str, name: str) -> None:
    folder = tmp_path / "integers"
    experts = {} if family == "llama" else {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    source = save_tiny(tmp_path / "model", family, hidden_size=256, intermediate_size=512, **experts)
    save_file(
        {key: tensor.bfloat16() for key, tensor in load_file(source / "model.safetensors").items()}, source / "model.safetensors"
    )
    save_integers(source, folder, tmp_path / "exact", KINDS[name])
    options = LoadOptions(dtype=torch.bfloat16, device=CPU, kernels=Kernels(compiled=True), positions=64)
    loaded = open_model(folder).load(SoloCollective(), options).num_bytes
    assert loaded <= 1.05 * sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
