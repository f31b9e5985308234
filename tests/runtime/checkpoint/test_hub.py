"""Hub downloads over HTTP: files, revisions and folders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.folder import weight_files
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.sources.hub import download
from phalanx_runtime.checkpoint.sources.remote import select_files
from phalanx_runtime.checkpoint.sources.remote_file import RemoteFile, mismatch
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.gguf_files import TinyGguf
from tests.runtime.checkpoint.hub import FILES, NAME, WEIGHTS, HubServer, fetch, hub_at, names


def test_only_needed_files_are_fetched(server: HubServer, tmp_path: Path) -> None:
    commit = server.add(NAME, FILES)
    snapshot = fetch(server, tmp_path)
    assert snapshot.version == commit
    assert names(snapshot.dir) == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert (snapshot.dir / "model.safetensors").read_bytes() == WEIGHTS


def test_calibrations_of_pages_are_fetched_with_the_model(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES | {"pages.kv": b"roundings", "other/pages.kv": b"of another model"})
    folder = fetch(server, tmp_path).dir
    assert (folder / "pages.kv").read_bytes() == b"roundings" and not (folder / "other").exists()


def test_a_second_download_fetches_no_file_again(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    first = fetch(server, tmp_path)
    num_requests = len(server.requests_for("config.json"))
    assert fetch(server, tmp_path) == first
    assert len(server.requests_for("config.json")) == num_requests


def test_a_branch_with_a_slash_is_a_revision(server: HubServer, tmp_path: Path) -> None:
    commit = server.add(NAME, FILES, branch="feature/x")
    assert fetch(server, tmp_path, revision="feature/x").version == commit


def test_moved_branch_is_fetched_again(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    first = fetch(server, tmp_path)
    server.add(NAME, FILES | {"config.json": b"{}"})
    second = fetch(server, tmp_path)
    assert first.dir != second.dir
    assert (second.dir / "config.json").read_bytes() == b"{}"


def listed(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name=name, url="") for name in names]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config.json", "model.safetensors", "consolidated.safetensors"], ["config.json", "model.safetensors"]),
        (
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.safetensors", "model.bin"],
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "x.safetensors"],
        ),
        (["weights.safetensors", "tokenizer.model"], ["tokenizer.model", "weights.safetensors"]),
        (
            ["chat_template.jinja", "added_tokens.json", "special_tokens_map.json", "sub/config.json", "model.safetensors"],
            ["chat_template.jinja", "added_tokens.json", "special_tokens_map.json", "model.safetensors"],
        ),
        (
            ["modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json", "a/1_Pooling/config.json"],
            ["modules.json", "1_Pooling/config.json", "model.safetensors"],
        ),
    ],
    ids=["one-file", "sharded", "odd-name", "companions", "pooling"],
)
def test_selected_files(files: list[str], expected: list[str]) -> None:
    assert [file.name for file in select_files(listed(*files), None, "here", "hf://org/name")] == expected


SHARDS = {"model.safetensors-00001-of-00002.safetensors": WEIGHTS, "layers.safetensors": b"last"}
INDEXED = {"model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in SHARDS}}).encode()}


def test_the_index_names_the_weights_to_fetch(server: HubServer, tmp_path: Path) -> None:
    texts = {name: FILES[name] for name in ("config.json", "tokenizer.json")}
    server.add(NAME, texts | INDEXED | SHARDS | {"consolidated.safetensors": b"the same once more"})
    folder = fetch(server, tmp_path).dir
    assert {path.name for path in folder.glob("*.safetensors")} == SHARDS.keys()
    assert weight_files(folder) == [folder / "layers.safetensors", folder / "model.safetensors-00001-of-00002.safetensors"]
    assert not server.requests_for("consolidated.safetensors")


def test_file_of_all_weights_goes_before_an_index(server: HubServer, tmp_path: Path) -> None:
    """As in `transformers`: the shards are of an earlier upload, which the next one left there."""
    server.add(NAME, FILES | INDEXED | SHARDS)
    folder = fetch(server, tmp_path).dir
    assert weight_files(folder) == [folder / "model.safetensors"] == list(folder.glob("*.safetensors"))
    for name, content in SHARDS.items():
        (folder / name).write_bytes(content)
    assert weight_files(folder) == [folder / "model.safetensors"]
    index = {"weight_map": {"a": "model.safetensors", "b": "layers.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(folder) == [folder / "layers.safetensors", folder / "model.safetensors"]


def test_gguf_file_is_fetched_only_on_request(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, {"sub/a.gguf": b"GGUF", "b.gguf": b"GGUF", "config.json": b"{}"})
    snapshot = download(hub_at(server.endpoint), NAME, None, tmp_path, "sub/a.gguf")
    assert names(snapshot.dir) == {"sub", "sub/a.gguf"}
    with pytest.raises(ModelError, match=r"has no file c.gguf"):
        download(hub_at(server.endpoint), NAME, None, tmp_path, "c.gguf")
    with pytest.raises(ModelError, match=r"has no \*.safetensors; to serve a GGUF file, write hf://org/tiny/b.gguf"):
        fetch(server, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "tokenizer/../../x.json", "tokenizer\\..\\x", "tokenizer\n.json", "a/.."],
    ids=["parent", "absolute", "inner-parent", "backslash", "control", "ends-in-parent"],
)
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="unsafe name"):
        select_files(listed("model.safetensors", name), None, "here", "hf://org/name")


def test_locate_downloads_from_the_endpoint_of_the_environment(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = server.add(NAME, FILES)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    found = locate(NAME, cache_dir=tmp_path / "cache", progress=messages.append)
    assert found == locate(f"hf://{NAME}", revision=commit, cache_dir=tmp_path / "cache")
    assert (found.source, found.version) == (f"hf://org/tiny@{commit}", commit)
    assert (found.dir / "model.safetensors").read_bytes() == WEIGHTS
    assert messages == [f"downloading org/tiny at {commit}: 4 files, 1 MB"]


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({}, ""),
        ({"tokenizer.model": b"", "1_Pooling/vocab.txt": b""}, "; tokenizer.model is not read: add the tokenizer.json that .*"),
    ],
    ids=["none", "sentencepiece"],
)
def test_repository_without_tokenizer_is_refused_before_its_download(
    files: dict[str, bytes], hint: str, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(NAME, {"config.json": b"{}", "model.safetensors": WEIGHTS, **files})
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    with pytest.raises(ModelError, match=f"org/tiny at revision main is no model: it has no tokenizer.json{hint}$"):
        locate(f"hf://{NAME}", cache_dir=tmp_path)
    assert len(server.requests) == 1


def test_gguf_file_of_a_repository_is_converted(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.add(NAME, {"q/tiny.gguf": TinyGguf().write(tmp_path / "tiny.gguf").read_bytes()})
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    found = locate(f"hf://{NAME}/q/tiny.gguf", cache_dir=tmp_path / "cache")
    assert (found.source, found.version) == (f"hf://org/tiny@{commit}/q/tiny.gguf", commit)
    assert read_assets(found.dir, ["tiny"], None).eos_token_ids == [1]


def test_long_download_logs_its_progress(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    messages: list[str] = []
    hub = hub_at(server.endpoint, progress=messages)
    download(replace(hub, control=replace(hub.control, report_every_s=0.0)), NAME, None, tmp_path)
    assert messages[-1] == "downloading org/tiny: 1 of 1 MB"


def test_file_without_hash_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"any")
    assert mismatch(RemoteFile(name="x", url=""), tmp_path / "x") is None
    assert mismatch(RemoteFile(name="x", url="", size=4), tmp_path / "x") == "3 bytes instead of 4"
