"""The Triton backend in a whole model, in the interpreter: tokens equal those of the torch reference."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from phalanx_api.engine_config import KvCacheDtype
from phalanx_runtime.commands import CalibrationSpec
from phalanx_runtime.fitting.calibrate import calibrate
from phalanx_runtime.model.attention.calibration import write_calibration
from phalanx_runtime.model.attention.gpu import MAX_SPLITS, TritonAttention, can_attend, max_splits
from phalanx_runtime.model.attention.paged import PagedAttention
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.decoder.load import OPS, choose_ops
from phalanx_runtime.model.kernels.variant import observed_launches
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks
from tests.runtime.tiny import VOCAB_SIZE, Family, save_tiny

NUM_TOKENS = 4


def tokens(folder: Path, build: Build) -> list[list[int]]:
    chance = torch.Generator().manual_seed(7)
    requests = [DriverRequest(torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist()) for size in (1, 9, 17)]
    return on_ranks(folder, [1], build, lambda runner: Driver(runner).generate(requests, NUM_TOKENS, chunk=8, lag=1))


HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("gemma2", "olmo2", "llama", "smollm3")),
        pytest.param("phi3", HALF_ROTATED, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, changes: dict[str, Any]
) -> None:
    folder = save_tiny(tmp_path / "model", family, **changes)
    attention, ops = TritonAttention(), TritonOps()
    expected = tokens(folder, Build(attention=PagedAttention()))
    monkeypatch.setitem(cast(dict[str, Any], OPS), "cpu", lambda: ops)
    assert tokens(folder, Build(attention=attention)) == expected
    assert attention.num_computed > 0
    assert ops.num_launched > 0


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "calibration"),
    [
        ("qwen3", "int8", None),
        pytest.param("llama", "int4", "pages.kv", marks=pytest.mark.slow),
        *(pytest.param("llama", name, None, marks=pytest.mark.slow) for name in ("int4", "fp8")),
    ],
)
def test_compressed_pages_give_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, kv_cache_dtype: KvCacheDtype, calibration: str | None
) -> None:
    folder = save_tiny(tmp_path / "model", family)
    if calibration is not None:
        spec = CalibrationSpec(model_dir=str(folder), out="", tokens=100, dtype="float32")
        write_calibration(folder / calibration, *calibrate(spec, torch.device("cpu"), lambda: 0.0))
    attention, ops = TritonAttention(), TritonOps()
    form: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "calibration": calibration}
    expected = tokens(folder, Build(attention=PagedAttention(), **form))
    monkeypatch.setitem(cast(dict[str, Any], OPS), "cpu", lambda: ops)
    with observed_launches() as found:
        assert tokens(folder, Build(attention=attention, **form)) == expected
    calibrated = {"round_in_turn", "restore_heads"} if calibration else set[str]()
    assert {variant.name for variant in found} >= {"compress_heads", "paged_attention"} | calibrated
    assert "prepare_heads" not in {variant.name for variant in found}


@pytest.mark.slow
def test_any_model_writes_compressed_pages_by_the_kernel(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    reference, kernels = (
        Build(attention=attention, kv_cache_dtype="int8", level="transformers")
        for attention in (PagedAttention(), TritonAttention())
    )
    expected = tokens(folder, reference)
    with observed_launches() as found:
        assert tokens(folder, kernels) == expected
    assert {variant.name for variant in found} >= {"compress_heads", "paged_attention"}


def test_float64_is_computed_by_the_reference(tmp_path: Path) -> None:
    kernels = TritonAttention()
    folder = save_tiny(tmp_path / "model", "llama")
    wide = Build(dtype=torch.float64, attention=kernels)
    assert tokens(folder, wide) == tokens(folder, Build(dtype=torch.float64, attention=PagedAttention()))
    assert kernels.num_computed == 0


@pytest.mark.parametrize(
    ("dim", "dtype", "expected"),
    [(256, torch.bfloat16, True), (264, torch.bfloat16, False), (128, torch.float32, True), (256, torch.float32, False)],
)
def test_kernels_support_dimensions_by_dtype(dim: int, dtype: torch.dtype, expected: bool) -> None:
    assert can_attend(dim, dtype) == expected


def test_a_gpu_gets_the_kernels() -> None:
    assert isinstance(choose_ops(torch.device("cuda")), TritonOps)
    assert isinstance(choose_attention(torch.device("cuda")), TritonAttention)


@pytest.mark.parametrize(("num_decodes", "kv_heads", "expected"), [(0, 8, 64), (1, 8, 64), (16, 8, 4), (33, 8, 1), (500, 8, 1)])
def test_splits_fill_the_device(num_decodes: int, kv_heads: int, expected: int) -> None:
    splits = max_splits(num_decodes, kv_heads, 132)
    assert splits == min(expected, MAX_SPLITS)
    assert splits & (splits - 1) == 0
