"""Resolution of model URIs, conversion, assets, and their errors."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from phalanx_api import wire
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.folder import GGUF_FILE, check_model_folder, make_once, weight_files
from phalanx_runtime.checkpoint.locate import LocalModel, locate
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.gguf_files import TinyGguf

CONFIG = {"model_type": "llama", "max_position_embeddings": 64}


def model_folder(folder: Path, *leave_out: str, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"config.json": json.dumps(CONFIG), "tokenizer.json": '{"model": {}}', "model.safetensors": "weights"}
    for name, text in (content | files).items():
        if name not in leave_out:
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("written", ["{}", "file://{}", "file://localhost{}"])
def test_a_folder_is_itself(tmp_path: Path, written: str) -> None:
    folder = model_folder(tmp_path / "a model")
    assert locate(written.format(folder), cache_dir=tmp_path / "cache") == LocalModel(folder, str(folder))
    assert not (tmp_path / "cache").exists()


def test_a_percent_escape_in_a_file_url_is_undone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a model")
    assert locate(f"file://{tmp_path}/a%20model", cache_dir=tmp_path).dir == folder


def test_path_precedes_a_repository_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    model_folder(tmp_path / "org" / "name")
    assert locate("org/name", cache_dir=tmp_path / "cache").dir == Path("org/name")


def test_gguf_file_is_read_once_per_content(tmp_path: Path) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    messages: list[str] = []
    first = locate(str(gguf), cache_dir=tmp_path / "cache", progress=messages.append)
    assert locate(f"file://{gguf}", cache_dir=tmp_path / "cache", progress=messages.append) == first
    assert messages == [f"reading {gguf}"]
    assert read_assets(first.dir, ["tiny"], None).max_model_len == 128
    status = os.stat(gguf)
    TinyGguf(tied=False).write(gguf)
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert locate(str(gguf), cache_dir=tmp_path / "cache").dir != first.dir


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
BAD_FOLDERS = {
    "nothing": (
        ("config.json", "tokenizer.json", "model.safetensors"),
        {},
        r"no config.json and no tokenizer.json and no \*.safe",
    ),
    "no-config": (("config.json",), {}, "is no model folder: it has no config.json$"),
    "no-tokenizer": (("tokenizer.json",), {}, "it has no tokenizer.json$"),
    "other-tokenizer": (("tokenizer.json",), {"tekken.json": "{}"}, "it has no tokenizer.json; tekken.json is not read"),
    "no-weights": (("model.safetensors",), {}, r"it has no \*.safetensors$"),
    "pickled": (("model.safetensors",), {"pytorch_model.bin": "x"}, "convert them to safetensors"),
    "gguf-inside": (("config.json", "model.safetensors"), {"x.gguf": "GGUF"}, "name the file: .*/x.gguf"),
    "missing-shard": (
        ("model.safetensors",),
        {"model.safetensors.index.json": INDEX, "model-1.safetensors": "x"},
        "it has no model-2.safetensors$",
    ),
    "index-not-json": ((), {"model.safetensors.index.json": "{"}, "index.json is not JSON"),
    "index-without-map": ((), {"model.safetensors.index.json": "{}"}, "weight_map must be an object"),
    "index-a-list": ((), {"model.safetensors.index.json": "[]"}, "must hold a JSON object"),
}


@pytest.mark.parametrize(("leave_out", "files", "reason"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_missing_files_of_a_folder_are_named(
    tmp_path: Path, leave_out: tuple[str, ...], files: dict[str, str], reason: str
) -> None:
    folder = model_folder(tmp_path / "model", *leave_out, **files)
    with pytest.raises(ModelError, match=reason):
        locate(str(folder), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/no/such/model", "model /no/such/model: no such file or folder"),
        ("just-a-name", r"no such file or folder \(a model of the hub is written hf://org/name\)"),
        ("file:///no/such", "no such file or folder"),
        ("file://host/x", "a file URL has three slashes"),
        ("file://relative", "a file URL has three slashes"),
        ("pvc://claim/x", "pvc:// cannot be opened here"),
        ("ftp://host/x", "ftp:// cannot be opened here"),
        ("hf://name", "hf://org/name or hf://org/name/file.gguf is expected"),
        ("hf://org/name/readme.md", "hf://org/name or hf://org/name/file.gguf is expected"),
        ("hf://../name", "hf://org/name or hf://org/name/file.gguf is expected"),
        ("", "is no model folder"),
    ],
)
def test_invalid_model_is_reported(tmp_path: Path, model: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=reason):
        locate(model, cache_dir=tmp_path)


def test_invalid_gguf_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is a file, but no \.gguf file"):
        locate(str(tmp_path / "model.bin"), cache_dir=tmp_path)


def test_folder_created_by_another_process_is_used(tmp_path: Path) -> None:
    def make(part: Path) -> None:
        raise AssertionError("it is there already")

    (tmp_path / "x").mkdir()
    assert make_once(tmp_path / "x", make, threading.Event()) == tmp_path / "x"


def test_two_processes_create_a_folder_once(tmp_path: Path) -> None:
    making, resume, makers = threading.Event(), threading.Event(), list[str]()

    def slow(part: Path) -> None:
        makers.append("first")
        making.set()
        assert resume.wait(30)

    def never(part: Path) -> None:
        makers.append("second")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make_once, tmp_path / "x", slow, threading.Event())
        assert making.wait(30)
        stopped = threading.Event()
        stopped.set()
        with pytest.raises(ModelError, match="stopped while another process makes"):
            make_once(tmp_path / "x", never, stopped)
        second = pool.submit(make_once, tmp_path / "x", never, threading.Event())
        resume.set()
        assert first.result(30) == second.result(30) == tmp_path / "x"
    assert makers == ["first"]


def test_gguf_file_becomes_a_link_in_a_folder(tmp_path: Path) -> None:
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    folder = locate(str(gguf), cache_dir=tmp_path / "cache").dir
    assert (folder / GGUF_FILE).readlink() == gguf and weight_files(folder) == [folder / GGUF_FILE]
    check_model_folder(folder)
    gguf.unlink()
    with pytest.raises(ModelError, match=r"it has no weights.gguf"):
        check_model_folder(folder)


def test_assets_contain_the_api_servers_files(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path / "model",
        **{"chat_template.jinja": "{{ x }}", "generation_config.json": '{"eos_token_id": [5, 6]}', "notes.txt": ""},
    )
    assets = read_assets(folder, ["a", "b"], 32)
    assert set(assets.files) == {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert (assets.served_names, assets.max_model_len, assets.eos_token_ids) == (["a", "b"], 32, [5, 6])
    assert assets == wire.make_assets(assets.files, ["a", "b"], 32, [5, 6])


def test_assets_have_chosen_parsers(tmp_path: Path) -> None:
    parsers = wire.ParserNames(tool_call="hermes")
    assets = read_assets(model_folder(tmp_path / "model"), ["m"], None, parsers=parsers)
    assert msgspec.json.decode(assets.files[wire.PARSERS_FILE], type=wire.ParserNames) == parsers
    assert wire.PARSERS_FILE not in read_assets(tmp_path / "model", ["m"], None, parsers=wire.ParserNames()).files


TOKENIZER = json.dumps({"added_tokens": [{"content": "</s>", "id": 7}], "model": {"vocab": {"<end>": 8}}})
EOS = {
    "generation-config": ({"generation_config.json": '{"eos_token_id": 3}'}, {"eos_token_id": 4}, [3]),
    "config": ({"generation_config.json": "{}"}, {"eos_token_id": [4, 5]}, [4, 5]),
    "by-name": ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, {}, [7]),
    "by-record": ({"tokenizer_config.json": '{"eos_token": {"content": "</s>"}}'}, {"eos_token_id": None}, [7]),
    "in-vocabulary": ({"tokenizer_config.json": '{"eos_token": "<end>"}'}, {}, [8]),
    "unknown": ({"tokenizer_config.json": '{"eos_token": "<?>"}'}, {}, []),
    "turn": ({"tokenizer_config.json": '{"eos_token": "<end>"}', "generation_config.json": '{"eos_token_id": 3}'}, {}, [3, 8]),
    "same": ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, {"eos_token_id": [9, 7]}, [9, 7]),
    "none": ({}, {}, []),
}


@pytest.mark.parametrize(("files", "config", "ids"), EOS.values(), ids=EOS)
def test_end_of_sequence_ids(tmp_path: Path, files: dict[str, str], config: dict[str, object], ids: list[int]) -> None:
    files = {"tokenizer.json": TOKENIZER, "config.json": json.dumps(CONFIG | config)} | files
    assert read_assets(model_folder(tmp_path / "model", **files), ["m"], None).eos_token_ids == ids


@pytest.mark.parametrize(
    ("config", "requested", "expected"),
    [(64, None, 64), (64, 32, 32), (64, 64, 64), (None, 32, 32)],
    ids=["all", "less", "same", "unknown"],
)
def test_maximum_length(tmp_path: Path, config: int | None, requested: int | None, expected: int) -> None:
    folder = model_folder(tmp_path / "model", **{"config.json": json.dumps({"max_position_embeddings": config})})
    assert read_assets(folder, ["m"], requested).max_model_len == expected


@pytest.mark.parametrize(
    ("leave_out", "files", "requested", "reason"),
    [
        (("tokenizer.json",), {}, None, "has no tokenizer.json"),
        (("config.json",), {}, None, "cannot read .*config.json: No such file"),
        ((), {"config.json": "{}"}, None, "max_position_embeddings must be a positive integer, it is None"),
        ((), {"config.json": f'{{"max_position_embeddings": {10**30}}}'}, None, "must be a positive integer, it is 1000"),
        ((), {"config.json": "[" * 100_000}, None, "config.json is not JSON"),
        ((), {}, 65, "--max-model-len 65 is more than the model's max_position_embeddings, 64"),
    ],
    ids=["tokenizer", "config", "positions", "huge", "deep", "too-long"],
)
def test_unreadable_assets_are_reported(
    tmp_path: Path, leave_out: tuple[str, ...], files: dict[str, str], requested: int | None, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        read_assets(model_folder(tmp_path / "model", *leave_out, **files), ["m"], requested)


def test_ids_that_no_vocabulary_has_are_ignored(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 64, "vocab_size": 2**70, "eos_token_id": [2**70, -1, 0, 3]}
    assets = read_assets(model_folder(tmp_path / "model", **{"config.json": json.dumps(config)}), ["m"], None)
    assert assets.vocab_size is None and assets.eos_token_ids == [0, 3]
