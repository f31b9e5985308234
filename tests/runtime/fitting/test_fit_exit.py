"""`phalanx-runtime fit-exit`: the fit, its file and its errors."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx_runtime.__main__ import main
from phalanx_runtime.checkpoint.model_hash import weights_hash
from phalanx_runtime.commands import FitSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.fitting.fit import Ridge, fit
from phalanx_runtime.model.decoder.exit import exit_layers, read_exit, write_exit
from tests.runtime.tiny import save_tiny

CPU = torch.device("cpu")
REST = {"ratio": "0.4", "num_tokens": "9", "agreement_raw": "0.1", "agreement_fitted": "0.2"}
STORIES = Path(__file__).parents[4] / "shared" / "models" / "stories15m"


def spec(folder: Path, **fields: Any) -> FitSpec:
    return FitSpec(**{"model_dir": str(folder), "out": "", "tokens": 3000, "dtype": "float64", **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("fit") / "model", num_hidden_layers=4)


def test_fit_equals_least_squares_for_any_split() -> None:
    chance = torch.Generator().manual_seed(1)
    x = torch.randn((200, 5), generator=chance, dtype=torch.float64) + 3
    weight, bias = torch.randn((4, 5), generator=chance, dtype=torch.float64), torch.randn(4, generator=chance).double()
    ridge = Ridge(5, 4, CPU)
    for part in torch.split(x, 33):
        ridge.add(part, part @ weight.t() + bias)
    assert ridge.num_pairs == 200
    fitted_weight, fitted_bias = ridge.solve(penalty=1e-12)
    assert torch.allclose(fitted_weight, weight, atol=1e-6) and torch.allclose(fitted_bias, bias, atol=1e-6)
    penalised, _ = ridge.solve(penalty=1e3)
    assert penalised.norm() < 0.1 * weight.norm(), "a penalty shrinks the weights"


@pytest.mark.parametrize(("ratio", "layers", "first"), [(0.4, 6, 2), (0.4, 30, 12), (0.01, 6, 1), (1.0, 6, 5), (0.5, 1, 1)])
def test_ratio_selects_at_least_one_layer_and_never_all(ratio: float, layers: int, first: int) -> None:
    assert exit_layers(ratio, layers) == first


def test_fitted_exit_agrees_more_and_round_trips(folder: Path, tmp_path: Path) -> None:
    fitted = fit(spec(folder, ratio=0.75), CPU, itertools.count().__next__)
    card = fitted.card
    assert (card.num_layers, card.ratio, card.model_hash) == (3, 0.75, weights_hash(folder))
    assert 3000 * 0.8 < card.num_tokens <= 3100
    assert card.agreement_fitted > card.agreement_raw, card
    write_exit(tmp_path / "exit", fitted)
    read = read_exit(tmp_path / "exit", torch.float64, CPU)
    assert read.card == card and list(tmp_path.iterdir()) == [tmp_path / "exit"]
    states = torch.randn((3, 64), dtype=torch.float64)
    assert torch.allclose(read(states), fitted(states), atol=1e-4)


def test_equal_seeds_give_equal_exits_within_the_time(folder: Path) -> None:
    one, same, other = (fit(spec(folder, seconds=40.0, seed=seed), CPU, itertools.count().__next__) for seed in (5, 5, 6))
    assert one.card == same.card and bool((one.weight == same.weight).all())
    assert one.card.num_tokens < 3000 * 0.5, "the time limit ended it"
    assert not bool((one.weight == other.weight).all())


def test_models_that_cannot_draft_by_their_layers_are_refused(tmp_path: Path) -> None:
    flat = save_tiny(tmp_path / "flat", num_hidden_layers=1)
    with pytest.raises(ModelError, match="needs a model of at least two"):
        fit(spec(flat), CPU, itertools.count().__next__)
    mixture = save_tiny(tmp_path / "mixture", "qwen2_moe")
    with pytest.raises(ModelError, match="Qwen2MoeForCausalLM is not supported"):
        fit(spec(mixture), CPU, itertools.count().__next__)


def test_invalid_exit_file_is_refused(folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    write_exit(good, fit(spec(folder, tokens=200), CPU, itertools.count().__next__))
    save_file(load_file(good), tmp_path / "bare")
    broken = {"format": "phalanx exit 1", "model_hash": "x", "num_layers": "two"}
    save_file(load_file(good), tmp_path / "broken", broken)
    (tmp_path / "text").write_text("no tensors")
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, tmp_path / "oblong", dict(broken, num_layers="2", **REST))
    cases = {
        "missing": "cannot be read",
        "text": "cannot be read",
        "bare": "is not an exit: make one with phalanx-runtime fit-exit",
        "broken": "malformed metadata",
        "oblong": r"its weight is \[3, 2\], its bias \[3\]",
    }
    for name, reason in cases.items():
        with pytest.raises(ModelError, match=reason):
            read_exit(tmp_path / name, torch.float32, CPU)


@pytest.mark.parametrize(("flags", "ratio", "layers"), [([], 0.4, 2), (["--ratio", "0.75"], 0.75, 3)], ids=["default", "flag"])
def test_command_fits_and_prints_the_agreement(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], ratio: float, layers: int
) -> None:
    out = tmp_path / "exit.safetensors"
    assert main(["fit-exit", str(folder), "--out", str(out), "--tokens", "300", *flags]) == 0
    assert f"{layers} layers agree with the model on held-out text" in capfd.readouterr().out
    card = read_exit(out, torch.float32, CPU).card
    assert (card.ratio, card.num_layers) == (ratio, layers)


def test_command_prints_the_reason_of_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-exit", str(tmp_path / "none"), "--out", str(tmp_path / "exit")]) == 1
    assert "no such file or folder" in capfd.readouterr().err
    flat = save_tiny(tmp_path / "flat", num_hidden_layers=1)
    assert main(["fit-exit", str(flat), "--out", str(tmp_path / "exit")]) == 1
    assert "needs a model of at least two" in capfd.readouterr().err
    assert not (tmp_path / "exit").exists()


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models/stories15m")
@pytest.mark.parametrize(("ratio", "raw", "fitted"), [(0.4, 0.07, 0.38), (0.67, 0.37, 0.53)], ids=["2 of 6", "4 of 6"])
def test_the_stories_model_agrees_as_was_measured(ratio: float, raw: float, fitted: float) -> None:
    card = fit(spec(STORIES, ratio=ratio, tokens=20_000, dtype="auto"), CPU, lambda: 0.0).card
    assert card.agreement_raw == pytest.approx(raw, abs=0.04) and card.agreement_fitted == pytest.approx(fitted, abs=0.05), card
