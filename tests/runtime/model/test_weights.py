"""Slices of checkpoints and their errors; linear layouts against `DenseLinear`; dtype by processor."""

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phalanx_runtime.checkpoint.folder import INDEX
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.linear import DenseLinear, PackedLinear, TwofoldLinear, can_pack
from phalanx_runtime.model.linear.registry import Kernels, choose_kernels, make_linear
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.partition import Span
from phalanx_runtime.model.processor import Processor, choose_dtype, read_processor
from phalanx_runtime.model.source import open_model
from phalanx_runtime.model.weights import Checkpoint

CPU = torch.device("cpu")
A = torch.arange(12.0).view(4, 3)
B = torch.arange(5.0)


def opened(folder: Path) -> Checkpoint:
    return Checkpoint(folder, torch.float64, CPU)


def sharded(folder: Path) -> Path:
    save_file({"a": A}, folder / "model-1.safetensors")
    save_file({"b": B}, folder / "model-2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    return folder


def single(folder: Path) -> Path:
    save_file({"a": A, "b": B}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [single, sharded])
def test_slices_are_read_in_the_wanted_dtype(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with opened(make(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint.rows("a", (4, 3), Span(1, 3)), A[1:3].double())
        assert torch.equal(checkpoint.columns("a", (4, 3), Span(1, 2)), A[:, 1:2].double())
        assert torch.equal(checkpoint.vector("b", 5), B.double())
        assert torch.equal(checkpoint.vector("b", 5, Span(2, 4)), B[2:4].double())
        assert checkpoint.has("a") and not checkpoint.has("c")
        with pytest.raises(ModelError, match="tensor c is missing"):
            checkpoint.vector("c", 1)
        with pytest.raises(ModelError, match=r"\[4, 3\].*\[4, 4\]"):
            checkpoint.rows("a", (4, 4), Span(0, 1))


@pytest.mark.parametrize(
    ("fields", "dtype"), [({}, "bfloat16"), ({"dtype": None}, "bfloat16"), ({"dtype": "float16"}, "float16")]
)
def test_weights_have_the_dtype_that_config_lacks(tmp_path: Path, fields: dict[str, object], dtype: str) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 4)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **fields}))
    codes = torch.zeros(4, dtype=torch.uint8)
    save_file({"a.codes": codes, "b.weight": B.bfloat16(), "c.scales": B}, tmp_path / "model.safetensors")
    assert open_model(tmp_path).dtype == dtype


def test_packed_codes_are_refused_as_such(tmp_path: Path) -> None:
    """Two codes in a byte also give another shape, as in ModelOpt's checkpoints whose config.json says nothing."""
    save_file({"a": torch.zeros(4, 3, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with opened(tmp_path) as checkpoint, pytest.raises(ModelError, match="a is stored as U8: its quantisation is not supported"):
        checkpoint.rows("a", (4, 6), Span(0, 4))


def test_one_shard_is_mapped_at_a_time(tmp_path: Path) -> None:
    folder = sharded(tmp_path)

    def mapped() -> list[str]:
        maps = Path("/proc/self/maps").read_text()
        return [shard for shard in ("model-1", "model-2") if f"{folder}/{shard}.safetensors" in maps]

    with opened(folder) as checkpoint:
        for _ in range(2):
            assert torch.equal(checkpoint.vector("b", 5), B.double())
            assert mapped() in (["model-2"], [])
            assert torch.equal(checkpoint.rows("a", (4, 3), Span(1, 3)), A[1:3].double())
            assert mapped() in (["model-1"], [])
    assert mapped() == []


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        opened(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        opened(tmp_path)


def test_a_broken_shard_is_refused(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-1.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{")
    with opened(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"model-1\.safetensors"):
        checkpoint.rows("a", (4, 3), Span(0, 1))


NAMES = [5, None, ["a"], "../model.safetensors", "/model.safetensors", "a/model.safetensors", "model.bin", "\0.safetensors"]


@pytest.mark.parametrize("text", ["{", "{}", "[]", "[" * 100_000], ids=["no JSON", "no map", "a list", "deep"])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(ModelError, match=INDEX):
        opened(tmp_path)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: object) -> None:
    (sharded(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": name}}))
    with pytest.raises(ModelError, match=rf"{INDEX}: weight_map: tensor 'b'"):
        opened(tmp_path)


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    (sharded(tmp_path) / INDEX).write_text(json.dumps({"weight_map": {"\ud800": "model-1.safetensors"}}))
    with opened(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"model-1\.safetensors.*surrogates"):
        checkpoint.shape("\ud800")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        opened(tmp_path)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this processor has no packed layout")
@pytest.mark.parametrize("tokens", [1, 2, 16, 70])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernels", [Kernels(True), Kernels(True, True)], ids=["packed", "twofold"])
def test_fast_linears_equal_the_dense_one(tokens: int, biased: bool, kernels: Kernels) -> None:
    chance = torch.Generator().manual_seed(tokens)
    weight, x = torch.randn(96, 48, generator=chance), torch.randn(tokens, 48, generator=chance)
    bias = torch.randn(96, generator=chance) if biased else None
    fast, dense = make_linear(weight, bias, kernels), DenseLinear(weight, bias)
    torch.testing.assert_close(fast(x), dense(x), rtol=1e-5, atol=1e-5)
    assert fast.num_bytes == dense.num_bytes


def test_layouts() -> None:
    weight = torch.zeros(16, 16)
    assert isinstance(make_linear(weight, None, Kernels()), DenseLinear)
    if can_pack(torch.float32):
        assert isinstance(make_linear(weight, None, Kernels(True)), PackedLinear)
        assert isinstance(make_linear(weight, None, Kernels(True, True)), TwofoldLinear)


def test_second_layout_exists_only_where_it_helps_and_fits() -> None:
    intel, other = Processor(True), Processor()
    assert choose_kernels(torch.float64, CPU, intel, 100, 10) == Kernels()
    gpu = torch.device("cuda")
    assert choose_kernels(torch.float64, gpu, intel, 100, 10, "int4") == Kernels(precision="int4")
    assert choose_kernels(torch.float16, gpu, intel, 100, 10, "int4") == Kernels(precision="int4", triton=True)
    packed, compiled = can_pack(torch.float32), library() is not None
    assert choose_kernels(torch.float32, CPU, intel, 100, 10) == Kernels(packed, packed, compiled)
    assert choose_kernels(torch.float32, CPU, intel, 9, 10) == Kernels(packed, False, compiled)
    assert choose_kernels(torch.float32, CPU, other, 100, 10) == Kernels(packed, False, compiled)
    assert choose_kernels(torch.float32, CPU, other, 100, 10, "int8") == Kernels(packed, False, compiled, "int8")


OLD, NEW = Processor(flags=frozenset({"avx2", "avx512f"})), Processor(flags=frozenset({"avx512_bf16"}))
DTYPES = {
    "requested": ("bfloat16", "float32", CPU, OLD, torch.bfloat16),
    "no bf16 here": ("auto", "bfloat16", CPU, OLD, torch.float32),
    "bf16 here": ("auto", "bfloat16", CPU, NEW, torch.bfloat16),
    "fp32 stays": ("auto", "float32", CPU, NEW, torch.float32),
    "fp16 on CPU": ("auto", "float16", CPU, NEW, torch.float32),
    "fp16 on GPU": ("auto", "float16", torch.device("cuda"), OLD, torch.float16),
    "fp16 requested on GPU": ("float16", "bfloat16", torch.device("cuda"), OLD, torch.float16),
    "another dtype on GPU": ("auto", "float8_e4m3fn", torch.device("cuda"), OLD, torch.bfloat16),
    "bf16 on GPU": ("auto", "bfloat16", torch.device("cuda"), OLD, torch.bfloat16),
}


@pytest.mark.parametrize(("requested", "stored", "device", "cpu", "dtype"), DTYPES.values(), ids=DTYPES.keys())
def test_dtype_by_capability(requested: str, stored: str, device: torch.device, cpu: Processor, dtype: torch.dtype) -> None:
    assert choose_dtype(requested, stored, device, cpu) == dtype


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="int3"):
        choose_dtype("int3", "float32", CPU, OLD)
    with pytest.raises(ModelError, match="float16 is for GPUs"):
        choose_dtype("float16", "float16", CPU, NEW)


@pytest.mark.parametrize(
    ("text", "processor"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2\n\nflags\t: other\n", Processor(True, frozenset({"fpu", "avx2"}))),
        ("Features\t: fp bf16\n", Processor(False, frozenset({"fp", "bf16"}))),
        ("", Processor()),
    ],
    ids=["x86", "arm", "nothing"],
)
def test_the_processor_is_read(tmp_path: Path, text: str, processor: Processor) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert read_processor(tmp_path / "cpuinfo") == processor
    assert read_processor(tmp_path / "none") == Processor()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86")
def test_torchs_limit_hides_the_vectors_beyond_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t: avx2 f16c avx512f avx512_bf16 amx_bf16 avx_vnni\n")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert read_processor(tmp_path / "cpuinfo").flags == {"avx2", "f16c"}
