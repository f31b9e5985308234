"""Vision towers whose config.json says other sizes than the weights have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_runtime.checkpoint.vision import VisionModel, read_vision
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.linear.registry import Kernels
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.vision.tower import Tower, load_tower
from phalanx_runtime.rank.profile_run import encode_blank
from tests.runtime.tiny_vision import save_tiny_vision

OPTIONS = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=Kernels(), positions=512)
WIDTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("llava") / "model", "llava")


def load(model: Path, folder: Path, vision: dict[str, Any], **fields: Any) -> Tower:
    """Loads the tower with another config.json. `vision`: fields of vision_config."""
    found = read_vision(model)
    assert isinstance(found, VisionModel)
    raw = json.loads((model / "config.json").read_text())
    (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**raw, **fields, "vision_config": {**raw["vision_config"], **vision}}))
    return load_tower(folder, found, WIDTH, OPTIONS)


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ({"intermediate_size": 2**36}, r"config\.json implies \[68719476736, 32\]"),
        ({"num_hidden_layers": 10**9}, r"config\.json: vision_config: num_hidden_layers 1000000000 must be within 0 and "),
        ({"num_hidden_layers": 4}, "tensor .* of the vision tower is missing"),
        ({"image_size": 2**62}, r"cannot be made from config\.json"),
        ({"patch_size": 0}, r"cannot be made from config\.json"),
        ({"hidden_size": -1}, r"cannot be made from config\.json"),
        ({"hidden_act": "none"}, r"cannot be made from config\.json: 'none'"),
    ],
    ids=["terabytes", "layers", "a layer", "overflow", "no patches", "negative", "activation"],
)
def test_sizes_are_compared_before_they_take_memory(model: Path, tmp_path: Path, vision: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(model, tmp_path, vision)


def test_code_of_a_checkpoint_is_never_run(model: Path, tmp_path: Path) -> None:
    """Nor does anybody get a question about it, which takes 15 s without a terminal."""
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelError, match="contains custom code"):
        load(model, tmp_path, {}, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})


def test_towers_that_compute_something_else_are_refused(model: Path, tmp_path: Path) -> None:
    tower = load(model, tmp_path, {})
    encode_blank(tower)
    vision = read_vision(model)
    assert vision is not None
    other = load_tower(tmp_path, VisionModel(vision.input, vision.scale), WIDTH // 2, OPTIONS)
    with pytest.raises(ModelError, match=r"config\.json: the vision tower does not compute images as described: a tile has 32"):
        encode_blank(other)


def test_errors_of_memory_keep_their_type() -> None:
    class Full:
        num_levels, request_bytes = 1, 1

        def blank(self) -> Any:
            raise torch.OutOfMemoryError("no memory")

        def peak_bytes(self, measured: int) -> int:
            return measured

        def encode(self, image: Any) -> torch.Tensor:
            return torch.zeros(1)

    with pytest.raises(torch.OutOfMemoryError):
        encode_blank(Full())
