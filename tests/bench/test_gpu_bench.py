"""`bench.gpu` on a CPU: every part with tiny models, by the engine loop and the kernels in the interpreter."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import safe_open

from bench.gpu.__main__ import main
from bench.gpu.bounds import Figure
from bench.gpu.clock import HostClock
from bench.gpu.kernel_table import SAMPLINGS, kernel_figures
from bench.gpu.kv_dtypes import kv_figures, layers_beyond_cache
from bench.gpu.others import attention_figures, generate_figures
from bench.gpu.packed_table import packed_figures
from bench.gpu.random_model import write_checkpoint
from bench.gpu.roofline import MODELS
from bench.gpu.serving import measure_load, measure_trace, router_figures, running_fleet
from bench.gpu.sizes import LLAMA_8B, QWEN3_600M, TINY, Config
from bench.gpu.steps import Bench, ideal_decode_s, large_model, prefill_flops, release, small_model
from bench.gpu.tiles import line, row_cases, time_rows
from phalanx_api.engine_config import KvCacheDtype
from phalanx_api.roofline import PRODUCTS, shape_of
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.linear.single_row import row_tile
from tests.runtime.ranks import Build, Driver, DriverRequest, make_model_runner

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield Bench(device=CPU, clock=HostClock(), rates=PRODUCTS["h100"], sizes=TINY)
    release()


def by_name(figures: Iterator[Figure]) -> dict[str, Figure]:
    found = {figure.name: figure for figure in figures}
    assert all(figure.bound is None and figure.value == figure.value for figure in found.values())
    return found


@pytest.mark.slow
def test_large_model_decodes_by_graphs_and_prefills(bench: Bench) -> None:
    found = by_name(large_model(bench))
    assert found["captured sizes"].value == 2
    rate, share = found["decode 2"], found["decode 2, of the copy rate"]
    assert rate.value > 0 and share.predicted is not None and 0 < share.value < share.predicted < 1
    assert {"decode 2, gap between steps", "decode 2, device busy", "prefill 24, of the matmul rate"} <= set(found)
    assert bench.decoded == {("large", 2): rate.value}


@pytest.mark.slow
def test_small_model_compares_graphs_with_eager_steps(bench: Bench) -> None:
    found = by_name(small_model(bench))
    for mode in ("graphs", "eager"):
        for lag in (0, 1):
            assert found[f"{mode}, lag {lag}, decode 1"].value > 0
    assert "graphs, decode 1, busy by the profiler" not in found


@pytest.mark.slow  # tracing makes the interpreter slower still
def test_profiler_finds_the_busy_share_of_steps(bench: Bench) -> None:
    found = by_name(small_model(replace(bench, sizes=replace(TINY, profiled_steps=1))))
    assert 0 < found["graphs, decode 1, busy by the profiler"].value <= 1


def test_each_kernel_has_time_and_share(bench: Bench) -> None:
    found = by_name(kernel_figures(bench))
    names = [name for name in found if ", of the " not in name]
    assert [f"sampling, {mode}, 2" for mode in SAMPLINGS] == [name for name in names if name.startswith("sampling")]
    for kernel in (
        "decode attention",
        "prefill attention",
        "norm",
        "add_norm",
        "gate",
        "prepare_heads",
        "logprobs",
        "verification",
    ):
        assert any(name.startswith(kernel) for name in names), kernel
    assert len(found) == 2 * len(names)


@pytest.mark.slow  # the interpreter takes a second for each
def test_each_packed_format_and_adapters_are_timed(bench: Bench) -> None:
    found = by_name(packed_figures(bench))
    formats = ("int4", "int8", "fp8", "W8A16", "W4A16", "AWQ", "MXFP4", "NVFP4", "nf4", "Q4_K", "Q6_K", "Q8_0")
    names = ["adapters, 2 rows on 2", *(f"linear, {name}, {rows}" for name in formats for rows in (1, 2))]
    assert list(found) == [each for name in names for each in (name, f"{name}, of the copy rate")]
    assert all(figure.value > 0 for figure in found.values())


@pytest.mark.slow
def test_decodes_over_each_kv_dtype_are_measured(bench: Bench) -> None:
    found = by_name(kv_figures(bench))
    for name in get_args(KvCacheDtype):
        assert found[f"{name}, decode 2 x 20"].value > 0 and found[f"{name}, decode 2 x 20, kernels alone"].value > 0
    limits = {name: found[f"{name}, decode attention, 2 x 20"].predicted or 0.0 for name in get_args(KvCacheDtype)}
    assert limits["auto"] > limits["int8"] == limits["fp8"] > limits["int4"] > 0, "codes have fewer bytes"
    assert [layers_beyond_cache(size << 20) for size in (1, 100, 999)] == [256, 3, 1]


@pytest.mark.slow
def test_others_are_measured_beside_ours(bench: Bench) -> None:
    bench.decoded["small", 1] = 10.0
    found = by_name(attention_figures(bench)) | by_name(generate_figures(bench))
    assert found["small, decode 1, ours / transformers"].value == pytest.approx(
        10.0 / found["small, decode 1, transformers generate"].value
    )
    assert "decode attention, 2 x 9, torch's time / ours" in found


def test_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--only", "attention", "--json", str(tmp_path / "figures.json")]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found == json.loads((tmp_path / "figures.json").read_text())
    assert [part["part"] for part in found["parts"]] == ["rates", "attention"]
    assert found["device"] == "CPU" and found["is_bounded"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_command_without_a_device_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN3_600M], ids=["llama", "qwen3"])
def test_random_checkpoint_is_one_of_the_family(tmp_path: Path, config: Config) -> None:
    tiny = {**config, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 300}
    tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    folder = write_checkpoint(tmp_path / "model", tiny, torch.float32, CPU)
    runner = make_model_runner(folder, SoloCollective(), Build(level="fused"))
    [output] = Driver(runner).generate([DriverRequest([5, 6, 7])], 3)
    assert len(output) == 3
    with safe_open(folder / "model.safetensors", "pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())
    assert runner.model.num_bytes == 4 * numbers, "every tensor is loaded"


def test_sizes_equal_those_of_the_predictions() -> None:
    assert {"llama-8b": shape_of(LLAMA_8B), "qwen3-0.6b": shape_of(QWEN3_600M)} == dict(MODELS)
    shape, device = MODELS["llama-8b"], PRODUCTS["h200"]
    num_bytes = 2 * shape.linear_weights + 512 * 131_072
    assert ideal_decode_s(shape, device, 512.0) == pytest.approx(num_bytes / 4.3e12)
    linears = 2 * 2048 * (shape.linear_weights - shape.vocab * shape.hidden) + 2 * shape.vocab * shape.hidden
    assert prefill_flops(shape, 2048) == pytest.approx(linears + 32 * 4 * 4096 * 2048 * 2049 / 2)


@pytest.mark.slow
@pytest.mark.system
def test_served_parts_run_whole_programs(bench: Bench) -> None:
    with running_fleet(bench, TINY.served, 1) as fleet:
        found = by_name(measure_trace(bench, fleet))
        assert found["TTFT p99"].value >= found["TTFT p50"].value > 0
        found = by_name(measure_load(replace(bench, sizes=replace(TINY, fast=TINY.served)), fleet))
        assert found["32 in, 16 out, p99 of the answer"].value > 0
        assert found["CPU, rank: engine loop and device"].value > 0
    assert by_name(router_figures(bench))["answered"].value > 0


def test_tiles_of_a_single_row_are_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where the times mean nothing."""
    monkeypatch.setattr("bench.gpu.tiles.CACHE_BYTES", 1 << 16)
    for case in row_cases("tiny", shape_of({**TINY.large, "hidden_size": 512, "intermediate_size": 24})):
        found = time_rows(replace(case, outputs=min(case.outputs, 24)), HostClock(), CPU, torch.float32)
        assert None in found and len(found) > 1 and row_tile(case.inputs, case.form) in found
        assert line(case, found).startswith(case.name)
