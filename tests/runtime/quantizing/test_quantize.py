"""`phalanx-runtime quantize`: its checkpoints have the tokens of their dequantised weights; its figures and refusals."""

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx_runtime.__main__ import main
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.commands import QuantizeScheme, QuantizeSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from phalanx_runtime.quantizing.layers import StoredLinear, choose_group, round_layers
from phalanx_runtime.quantizing.quantize import Report, quantize
from phalanx_runtime.quantizing.rounding import Grid
from phalanx_runtime.quantizing.texts import perplexity
from tests.runtime.checkpoint.gguf_files import TinyGguf
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import generate, reference
from tests.runtime.ranks import Build
from tests.runtime.tiny import save_tiny
from tests.runtime.tiny_vision import save_tiny_vision

CPU = torch.device("cpu")
STORIES = Path(__file__).parents[4] / "shared" / "models" / "stories15m"
WORDS = "The old ship sailed over a calm sea, and its crew sang of home. "


def run(
    model: Path,
    out: Path,
    scheme: QuantizeScheme = "w4a16",
    tokens: int = 600,
    calibration: Path | None = None,
    *,
    head: bool = False,
) -> Report:
    text = None if calibration is None else str(calibration)
    spec = QuantizeSpec(model_dir=str(model), out=str(out), scheme=scheme, tokens=tokens, calibration=text, head=head)
    return quantize(spec, CPU, print)


def dequantise(folder: Path, source: Path, exact: Path) -> None:
    """Writes what the codes in `folder` mean, by the description of compressed-tensors, as the model `exact`."""
    shutil.copytree(source, exact)
    is_tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    (exact / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": is_tied})
    )
    bits = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]["weights"][
        "num_bits"
    ]
    stored, found = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in stored.items():
        prefix = name.rpartition(".")[0]
        if name.endswith(".weight_packed"):
            outputs, inputs = stored[f"{prefix}.weight_shape"].tolist()
            words = tensor.numpy().view(np.uint32)[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint32)
            codes = (words & np.uint32(2**bits - 1)).reshape(outputs, -1)[:, :inputs].astype(np.float32) - 2 ** (bits - 1)
        elif name.endswith(".weight") and tensor.dtype == torch.int8:
            codes = tensor.numpy().astype(np.float32)
        else:
            if not re.search(r"weight_(scale|shape)$", name):
                found[name] = tensor
            continue
        scales = stored[f"{prefix}.weight_scale"].float()
        found[f"{prefix}.weight"] = torch.from_numpy(codes) * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    assert set(found) - {"lm_head.weight"} == set(load_file(source / "model.safetensors")) - {"lm_head.weight"}
    save_file(found, exact / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("llama", "w4a16"), ("qwen3", "w8a16"), ("gemma2", "w8a8"), ("phi3", "w4a8"), ("mixtral", "w4a16")],
)
def test_tokens_equal_those_of_dequantised_weights(tmp_path: Path, family: str, scheme: QuantizeScheme) -> None:
    source, out, exact = tmp_path / "model", tmp_path / "out", tmp_path / "exact"
    report = run(save_tiny(source, family), out, scheme)
    dequantise(out, source, exact)
    outputs = generate(out, [2], Build(kernels=Kernels(compiled=True)))
    assert compare(reference(exact, outputs), outputs).holds
    ratio = report.perplexity_after / report.perplexity_before
    assert report.bytes_after < 0.75 * report.bytes_before and ratio < (2 if scheme.startswith("w4") else 1.02)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    rounds, ignored = config["config_groups"]["group_0"]["input_activations"] is not None, config["ignore"]
    assert rounds == scheme.endswith("a8")
    assert "lm_head" in ignored and len(ignored) == (4 if family == "mixtral" else 1)


def test_a_tied_head_is_ignored_too(tmp_path: Path) -> None:
    """Other programs make the head a linear, and look for its codes."""
    run(save_tiny(tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=True), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_rounded_head_is_a_linear_of_its_own(tmp_path: Path, *, is_tied: bool) -> None:
    source, out, exact = tmp_path / "model", tmp_path / "out", tmp_path / "exact"
    run(save_tiny(source, num_hidden_layers=1, tie_word_embeddings=is_tied), out, "w8a8", head=True)
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["ignore"] == []
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.int8
    dequantise(out, source, exact)
    outputs = generate(out, [2], Build(kernels=Kernels(compiled=True)))
    assert compare(reference(exact, outputs), outputs).holds


class SingleRows:
    """`RowLinears` of a GPU, which compute one row without the linears of the layers."""

    def supports(self, x: Tensor) -> bool:
        """Whether x is one row."""
        return len(x) == 1

    def project(self, x: Tensor, norm: Tensor | None, linear: DenseLinear, eps: float) -> Tensor:
        """Is not called."""
        raise AssertionError("the inputs of a row are not recorded")

    def gate(self, x: Tensor, norm: Tensor | None, gated: PlainGated, eps: float) -> Tensor:
        """Is not called."""
        raise AssertionError("the inputs of a row are not recorded")

    def add(self, linear: DenseLinear, x: Tensor, residual: Tensor) -> None:
        """Is not called."""
        raise AssertionError("the inputs of a row are not recorded")


def test_texts_of_one_token_are_recorded(tmp_path: Path) -> None:
    folder = open_model(save_tiny(tmp_path, num_hidden_layers=1), "fused")
    form = LoadOptions(dtype=torch.float32, device=CPU, kernels=Kernels(), positions=64)
    model = folder.load(SoloCollective(), form)
    assert isinstance(model, Decoder)
    model.row_linears = SingleRows()
    linears = round_layers(model, form, [[1, 2, 3], [4]], Grid(8, None), torch.float32, has_head=True)
    assert [len(part) for part in linears] == [7, 1]


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    source, part = save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "out.part"
    (part / "folder").mkdir(parents=True)
    (part / "model-00001.safetensors").write_bytes(b"half a shard")
    run(source, tmp_path / "out", tokens=200)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in source.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_codes_are_freed_before_the_folder_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[tuple[int, int]] = []

    def measure(*arguments: Any) -> float:
        kinds = [type(one) for one in gc.get_objects()]
        alive.append((kinds.count(Decoder), kinds.count(StoredLinear)))
        return perplexity(*arguments)

    monkeypatch.setattr("phalanx_runtime.quantizing.quantize.perplexity", measure)
    gc.collect()
    run(save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "out", tokens=200)
    assert alive[1] == alive[0]


def test_a_layer_that_overflows_is_named(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", num_hidden_layers=2)
    tensors, text = load_file(source / "model.safetensors"), tmp_path / "text"
    tensors["model.layers.1.input_layernorm.weight"].fill_(1e30)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    text.write_text(WORDS * 20)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj cannot be rounded: .* not finite"):
        run(source, tmp_path / "out", tokens=1100, calibration=text)
    assert not (tmp_path / "out").exists()


def test_command_prints_size_and_perplexity(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, text, out = save_tiny(tmp_path / "model"), tmp_path / "text", tmp_path / "out"
    text.write_text(WORDS * 20)
    command = ["quantize", str(source), "--scheme", "w4a16", "--out", str(out)]
    assert main([*command, "--calibration", str(text), "--tokens", "1100"]) == 0
    printed = capfd.readouterr().out
    assert re.search(r"w4a16, 3 layers, 0\.\d MB of 0\.\d MB, in \d+ s", printed)
    assert re.search(rf"perplexity of 255 held-out tokens of {text}: [\d.]+ before, [\d.]+ after \([+-][\d.]+%\)", printed)
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert main(command) == 1
    assert f"{out} exists already" in capfd.readouterr().err


def test_models_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    source, text = save_tiny(tmp_path / "model", num_hidden_layers=1), tmp_path / "text"
    text.write_text("few words")
    cases = {
        f"{text}: 1 texts of up to 512 tokens; expected at least 4": (source, text),
        f"cannot read {tmp_path / 'other'}": (source, tmp_path / "other"),
        "experts in one tensor for all are not quantised": (save_tiny(tmp_path / "experts", "gpt_oss"), None),
        "models that take images are not quantised": (save_tiny_vision(tmp_path / "images", "llava"), None),
    }
    for reason, (model, calibration) in cases.items():
        with pytest.raises(ModelError, match=re.escape(reason)):
            run(model, tmp_path / "out", calibration=calibration)
        assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out", "w8a16")
    with pytest.raises(ModelError, match="is quantised already: compressed-tensors pack-quantized, 8 bits"):
        run(tmp_path / "out", tmp_path / "again")
    gguf = locate(str(TinyGguf().write(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache").dir
    with pytest.raises(ModelError, match="is GGUF, F32: convert the file first"):
        run(gguf, tmp_path / "again")


def test_groups_cut_all_linears_into_whole_ones() -> None:
    assert [choose_group(widths) for widths in ([256, 4096], [576, 1536], [288, 768])] == [128, 64, 32]
    with pytest.raises(ModelError, match="a linear has 100 inputs, no multiple of 32: use w8a16 or w8a8"):
        choose_group([64, 100])


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared models")
def test_cost_of_a_trained_model_is_small(tmp_path: Path) -> None:
    report = run(STORIES, tmp_path / "out", tokens=3000)
    assert report.num_held_out > 500
    assert report.perplexity_after / report.perplexity_before < 1.12
