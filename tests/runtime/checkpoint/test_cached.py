"""Read-only caches: cached models are served without requests."""

import os
import stat
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from phalanx_api.conditions import Reason
from phalanx_operator.decide.conditions.model import download_failure
from phalanx_runtime.__main__ import main
from phalanx_runtime.checkpoint.locate import locate, locate_adapter, locate_exit
from phalanx_runtime.commands import FetchSettings
from phalanx_runtime.errors import ModelError
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.runtime.checkpoint.hub import HubServer, running_hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"weights",
}
URI = "hf://org/tiny"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def lock(folder: Path) -> None:
    """Makes the folder read-only. Root can still write, so tests compare the content too."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            os.chmod(path, stat.S_IRUSR | stat.S_IXUSR)


def unlock(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            os.chmod(path, stat.S_IRWXU)


def test_cached_model_is_served_without_network_or_write(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    commit = server.add("org/tiny", FILES)
    assert main(["fetch", URI, "--download-dir", str(cache)]) == 0
    assert capsys.readouterr().out.strip().endswith(commit)
    before, num_requests = sorted(cache.rglob("*")), len(server.requests)
    lock(cache)
    try:
        found = locate(URI, cache_dir=cache, cached_only=True)
    finally:
        unlock(cache)
    assert found.dir.name == commit
    assert sorted(cache.rglob("*")) == before
    assert len(server.requests) == num_requests


def test_moved_branch_is_served_as_cached(server: HubServer, tmp_path: Path) -> None:
    first = server.add("org/tiny", FILES)
    locate(URI, cache_dir=tmp_path)
    server.add("org/tiny", FILES | {"model.safetensors": b"others"})
    messages: list[str] = []
    assert locate(URI, cache_dir=tmp_path, cached_only=True, progress=messages.append).dir.name == first
    assert "serving the last downloaded version" in messages[-1]


def test_missing_cached_model_has_a_condition_message(server: HubServer, tmp_path: Path) -> None:
    server.add("org/tiny", FILES)
    with pytest.raises(ModelError, match=r"there is no copy of org/tiny at revision main in .*phalanx-runtime fetch") as caught:
        locate(URI, cache_dir=tmp_path, cached_only=True)
    assert download_failure(str(caught.value)) is Reason.NOT_FOUND
    assert server.requests == [] and list(tmp_path.rglob("*")) == []


def test_failed_fetch_ends_with_the_reason(server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", URI, "--download-dir", str(tmp_path)]) == 1
    assert "phalanx-runtime fetch: there is no model org/tiny" in capsys.readouterr().err


def test_an_exit_is_fetched_with_its_model(server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.add("org/tiny", FILES)
    server.add("org/exits", {"exit.safetensors": b"the map"})
    exit = "hf://org/exits/exit.safetensors"
    assert main(["fetch", URI, "--download-dir", str(tmp_path)]) == 0
    with pytest.raises(ModelError, match=r"there is no copy of .*phalanx-runtime fetch \(an exit: with --exit\)") as caught:
        locate_exit(exit, cache_dir=tmp_path, cached_only=True)
    assert download_failure(str(caught.value)) is Reason.NOT_FOUND
    capsys.readouterr()
    assert main(["fetch", URI, "--exit", exit, "--download-dir", str(tmp_path)]) == 0
    num_requests = len(server.requests)
    found = locate_exit(exit, cache_dir=tmp_path, cached_only=True)
    assert found.read_bytes() == b"the map" and len(server.requests) == num_requests
    assert capsys.readouterr().out.splitlines()[1:] == [str(found)]


def test_adapters_are_fetched_for_read_only_caches(server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.add("org/tiny", FILES)
    for branch in ("main", "v2"):
        server.add("org/legal", {"adapter_config.json": branch.encode(), "adapter_model.safetensors": b"factors"}, branch=branch)
    find = partial(locate_adapter, "hf://org/legal", cache_dir=tmp_path, environment=os.environ, stop=threading.Event())
    with pytest.raises(ModelError, match=r"there is no copy of .*phalanx-runtime fetch MODEL --adapter URI"):
        find(cached_only=True)
    adapters = ["--adapter", "hf://org/legal", "--adapter", "hf://org/legal@v2"]
    assert main(["fetch", URI, *adapters, "--download-dir", str(tmp_path)]) == 0
    num_requests = len(server.requests)
    found = [find(cached_only=True, revision=revision) for revision in (None, "v2")]
    assert [(folder / "adapter_config.json").read_text() for folder in found] == ["main", "v2"]
    assert len(server.requests) == num_requests
    assert capsys.readouterr().out.splitlines()[1:] == [str(folder) for folder in found]


def test_flags(tmp_path: Path) -> None:
    served = read_settings(["serve", URI, "--cached-only"], {})
    assert isinstance(served, ServeSettings) and served.model.cached_only
    fetched = read_settings(["fetch", URI, "--revision", "v1", "--download-dir", str(tmp_path)], {"HF_TOKEN": "t"})
    assert fetched == FetchSettings(model=URI, revision="v1", download_dir=tmp_path, hf_token="t")
