"""`phalanx-runtime calibrate-kv`: the calibration, its file, and the models and groups that refuse it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.__main__ import main
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.collective.protocol import Collective, SoloCollective
from phalanx_runtime.commands import CalibrationSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.fitting.calibrate import calibrate
from phalanx_runtime.model.attention.calibration import FORMAT, write_calibration
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.calibrated import use_calibration
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankReady
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import with_group
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
TEXT = "some words of a text " * 60


def write(folder: Path, name: str = "pages.kv", **fields: Any) -> Path:
    """Calibrates the model and writes the file into its folder."""
    spec = CalibrationSpec(**{"model_dir": str(folder), "out": "", "tokens": 200, "dtype": "float32", **fields})
    write_calibration(folder / name, *calibrate(spec, CPU, lambda: 0.0))
    return folder / name


def load(folder: Path, calibration: Path | str | None, kv_cache_dtype: str = "int4") -> RankReady:
    name = None if calibration is None else str(calibration)
    settings = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "kv_cache_memory_bytes": 1 << 20}
    spec = with_settings(make_spec(folder, 0, 1), **settings, kv_cache_calibration=name)
    return load_rank(spec, SoloCollective(), CPU, System())[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("calibrate") / "model")
    write(folder)
    return folder


def test_command_writes_a_file_that_a_rank_uses(tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    out = tmp_path / "pages.kv"
    assert main(["calibrate-kv", str(folder), "--out", str(out), "--text", str(tmp_path / "text"), "--tokens", "300"]) == 0
    assert "layers calibrated on 2" in capfd.readouterr().out
    plain, own, other = (load(folder, path).served for path in (None, "pages.kv", out))
    assert len({one.page_model for one in (plain, own, other)}) == 3, "pages of unequal calibration are never mixed"
    assert len({one.layout for one in (plain, own, other)}) == 3, "nor moved"
    assert plain.model_hash == own.model_hash == other.model_hash, "streams continue on either"
    assert plain.page_bytes == own.page_bytes


@pytest.mark.parametrize("has_text", [False, True])
def test_no_more_tokens_than_asked_are_used(tmp_path: Path, folder: Path, has_text: bool) -> None:
    """Texts are generated in rows: 8,192 tokens became 8,220."""
    (tmp_path / "text").write_text(TEXT)
    spec = CalibrationSpec(model_dir=str(folder), out="", text=str(tmp_path / "text") if has_text else "", tokens=100)
    assert calibrate(spec, CPU, lambda: 0.0)[0].num_tokens in ((99, 100) if has_text else (100,))


def test_equal_seeds_and_texts_give_equal_files(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    text = str(tmp_path / "text")
    one, same, other = (write(folder, "own.kv", seed=seed).read_bytes() for seed in (1, 1, 2))
    read, again = (write(folder, "read.kv", text=text).read_bytes() for _ in range(2))
    assert one == same and read == again
    assert len({one, other, read}) == 3


@pytest.mark.parametrize(
    ("family", "keys", "values"), [("llama", True, True), ("gemma2", False, True), ("gpt_oss", False, False)]
)
def test_softcaps_and_sinks_allow_no_shift(tmp_path: Path, family: Any, keys: bool, values: bool) -> None:
    tensors = load_file(write(save_tiny(tmp_path / "model", family)))
    assert bool(tensors["keys.shift"].any()) == keys and bool(tensors["values.shift"].any()) == values
    assert tensors["keys.triangle"].any() and tensors["values.triangle"].any()


def test_files_of_other_models_are_refused(tmp_path: Path, folder: Path) -> None:
    twin = write(save_tiny(tmp_path / "twin", seed=1))
    wide = write(save_tiny(tmp_path / "wide", num_hidden_layers=5))
    tensors = load_file(folder / "pages.kv")
    save_file(tensors, tmp_path / "bare")
    save_file(tensors, tmp_path / "broken", {FORMAT: '{"model_hash": "x"}'})
    (tmp_path / "text").write_text("no tensors")
    card = f'{{"model_hash": "{weights_hash(folder)}", "num_tokens": 1}}'
    save_file(tensors | {"keys.order": torch.zeros_like(tensors["keys.order"])}, tmp_path / "disorder", {FORMAT: card})
    cases: dict[Path | str, str] = {
        twin: "was made for the model .* and this one is .*: make it again",
        wide: r"was made for another model: its keys.shift is \[5, 2, 16\], expected \[\d, 2, 16\]",
        tmp_path / "missing": "cannot be read: no such file$",
        "pages.safetensors": r"cannot be read: no such file; of a downloaded model only files \*\.kv",
        tmp_path / "text": "cannot be read",
        tmp_path / "bare": "is not a calibration: make one with phalanx-runtime calibrate-kv",
        tmp_path / "broken": "malformed metadata",
        tmp_path / "disorder": "keys.order is no order of 16 dimensions",
    }
    for path, reason in cases.items():
        with pytest.raises(ModelError, match=reason):
            load(folder, path)


def test_groups_that_cannot_use_it_refuse_it(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match="needs --kv-cache-dtype fp8, int8 or int4"):
        load(folder, "pages.kv", "auto")
    other = save_tiny(tmp_path / "model", "qwen2_moe")
    with pytest.raises(ModelError, match="needs a model of the fused decoder"):
        load(other, folder / "pages.kv")


def test_the_calibration_is_on_the_device_of_the_pages(folder: Path) -> None:
    form, device = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(), positions=64), torch.device("meta")
    model = open_model(folder, "auto").load(SoloCollective(), form)
    spec = with_settings(make_spec(folder, 0, 1), kv_cache_dtype="int4", kv_cache_calibration="pages.kv")
    use_calibration(spec, model, Pipeline(SoloCollective(), 1), device)
    assert len(model.kv.roundings) == len(model.kv.head_dims)
    for rounding in model.kv.roundings:
        assert rounding.keys.triangle.device == rounding.values.order.device == device


def test_ranks_with_different_files_refuse_to_serve(tmp_path: Path, folder: Path) -> None:
    paths = [folder / "pages.kv", write(folder, "other.kv", seed=3)]

    def rank(group: Collective) -> None:
        settings = {"dtype": "float32", "kv_cache_dtype": "int4", "kv_cache_calibration": str(paths[group.rank])}
        load_rank(with_settings(make_spec(folder, group.rank, 2), **settings), group, CPU, System())

    with pytest.raises(ModelError, match="differs between the ranks"):
        with_group([2], rank)


@pytest.mark.parametrize(("text", "reason"), [("none", "text .*none cannot be read"), ("empty", "there is no text")])
def test_a_calibration_without_text_is_refused(tmp_path: Path, folder: Path, text: str, reason: str) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ModelError, match=reason):
        write(folder, "no.kv", text=str(tmp_path / text))
    assert not (folder / "no.kv").exists()
