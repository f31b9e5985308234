"""The model hash: equal for copies, different for any other computation."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx_runtime.checkpoint import model_hash as module
from phalanx_runtime.checkpoint.model_hash import model_hash
from phalanx_runtime.errors import ModelError

SHARDS = ("a.safetensors", "b.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two weight files of 4 KiB and some bytes each."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "1", "_name_or_path": "x"}))
    (model / "tokenizer.json").write_text("{}")
    for number, name in enumerate(SHARDS):
        header = json.dumps({"w": {"dtype": "F32", "shape": [1025], "data_offsets": [0, 4100]}}).encode()
        content = bytes((i * 7 + number) % 256 for i in range(4100))
        (model / name).write_bytes(struct.pack("<Q", len(header)) + header + content)
    return model


def name_of(folder: Path, dtype: str = "float32", quantization: str | None = None) -> str:
    return model_hash(folder, dtype, quantization)


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def flip(name: str, position: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 1
        (folder / name).write_bytes(content)

    return change


def swap_shards(folder: Path) -> None:
    first, second = (folder / name for name in SHARDS)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        change_config(transformers_version="2", _name_or_path="y"),
        lambda folder: (folder / "generation_config.json").write_text("{}"),
        lambda folder: (folder / "README.md").write_text("the same"),
    ],
    ids=["a copy", "who wrote it", "defaults of sampling", "another file"],
)
def test_equal_models_have_equal_hashes_anywhere(folder: Path, change: Callable[[Path], object]) -> None:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    change(copy)
    assert name_of(copy) == name_of(folder)


@pytest.mark.parametrize(
    "change",
    [
        change_config(rope_theta=1.0),
        lambda folder: (folder / "tokenizer.json").write_text("{} "),
        flip(SHARDS[0], 100),
        flip(SHARDS[1], -1),
        swap_shards,
        lambda folder: (folder / SHARDS[1]).rename(folder / "c.safetensors"),
    ],
    ids=["config", "tokenizer", "a weight", "the last byte", "shards swapped", "a file's name"],
)
def test_different_computations_have_different_hashes(folder: Path, change: Callable[[Path], object]) -> None:
    before = name_of(folder)
    change(folder)
    assert name_of(folder) != before


def test_dtype_and_quantisation_are_part_of_the_name(folder: Path) -> None:
    assert len({name_of(folder), name_of(folder, "bfloat16"), name_of(folder, "float32", "int8")}) == 3


@pytest.mark.parametrize("piece", [64, 1 << 20], ids=["many pieces", "one piece"])
def test_hash_of_a_large_model_samples_every_distance(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", 2000)  # of 8.4 KB: every fifth word
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    before, noticed = name_of(folder), 0
    for position in range(1000, 1080, 8):
        flip(SHARDS[0], position)(folder)
        noticed += name_of(folder) != before
        flip(SHARDS[0], position)(folder)
    assert noticed == 2
    assert name_of(folder) == before


def test_pieces_make_no_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_BYTES", 2000)
    whole = name_of(folder)
    monkeypatch.setattr(module, "PIECE_BYTES", 200)
    assert name_of(folder) == whole


def test_index_names_the_weight_files(folder: Path) -> None:
    before = name_of(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": SHARDS[0]}}))
    assert name_of(folder) != before


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        name_of(folder)


def test_how_images_become_pixels_counts(folder: Path) -> None:
    preprocessor = folder / "preprocessor_config.json"
    text = name_of(folder)
    preprocessor.write_text("{}")
    assert name_of(folder) == text, "a model of text has no images"
    change_config(vision_config={})(folder)
    before = name_of(folder)
    preprocessor.write_text('{"do_normalize": false}')
    assert name_of(folder) != before
