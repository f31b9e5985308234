"""How a checkpoint makes embeddings: files of sentence-transformers, and the setting."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_runtime.checkpoint.pooling import read_embedding
from phalanx_runtime.errors import ModelError

SIZE = 16
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def save(folder: Path, modules: Any = None, pooling: Any = None, name: str = "1_Pooling") -> Path:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(pooling))
    return folder


def test_generative_checkpoint_has_normalised_means(tmp_path: Path) -> None:
    assert read_embedding(tmp_path, SIZE, "auto") == wire.Embedding(size=SIZE, pooling="mean", is_normalised=True)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 16, "include_prompt": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("modules", [None, [TRANSFORMER, POOLING], [TRANSFORMER, POOLING, NORMALIZE]])
def test_checkpoint_decides_pooling_and_normalisation(tmp_path: Path, config: Any, pooling: wire.Pooling, modules: Any) -> None:
    found = read_embedding(save(tmp_path, modules, config), SIZE, "auto")
    assert found == wire.Embedding(size=SIZE, pooling=pooling, is_normalised=modules is None or NORMALIZE in modules)


def test_pooling_folder_has_the_name_of_its_module(tmp_path: Path) -> None:
    modules = [TRANSFORMER, {**POOLING, "path": "3_Pooling"}]
    save(tmp_path, modules, {"pooling_mode_cls_token": True}, name="3_Pooling")
    assert read_embedding(tmp_path, SIZE, "auto").pooling == "cls"


@pytest.mark.parametrize("setting", ["mean", "last", "cls"])
def test_setting_takes_the_place_of_the_checkpoints_mode(tmp_path: Path, setting: wire.Pooling) -> None:
    save(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True})
    assert read_embedding(tmp_path, SIZE, setting) == wire.Embedding(size=SIZE, pooling=setting, is_normalised=False)


@pytest.mark.parametrize(
    ("modules", "config", "part"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "with"),
        ([TRANSFORMER, POOLING], {}, "none"),
        ([TRANSFORMER, POOLING, {"type": "a.\ud800"}], {}, "\\ud800"),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, "Dense"),
    ],
)
def test_unsupported_modules_are_an_obstacle(tmp_path: Path, modules: Any, config: Any, part: str) -> None:
    assert part in read_embedding(save(tmp_path, modules, config), SIZE, "auto").obstacle


def test_module_is_an_obstacle_for_each_setting(tmp_path: Path) -> None:
    assert read_embedding(save(tmp_path, [TRANSFORMER, POOLING, DENSE]), SIZE, "last").obstacle


@pytest.mark.parametrize("content", ["{", "{}", "5", "[" * 100_000], ids=lambda text: text[:9])
def test_broken_files_are_reported_with_their_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_embedding(tmp_path, SIZE, "auto")


def test_unusable_name_of_the_pooling_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "x" * 3000}]))
    with pytest.raises(ModelError, match="File name too long"):
        read_embedding(tmp_path, SIZE, "auto")
