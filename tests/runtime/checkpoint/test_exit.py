"""Resolution of exits: a file or the only one in a folder, local, on a hub, in a bucket or registry."""

from pathlib import Path

import pytest

from phalanx_runtime.checkpoint.locate import locate_exit
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.hub import running_hub
from tests.runtime.checkpoint.store_kinds import Kind, for_stores

NAME = "exit.safetensors"


def test_folder_of_one_file_stands_for_the_file(tmp_path: Path) -> None:
    file = tmp_path / "an exit" / NAME
    file.parent.mkdir()
    file.write_bytes(b"exit")
    cache = tmp_path / "cache"
    for written in str(file), str(file.parent), f"file://{tmp_path}/an%20exit/{NAME}":
        assert locate_exit(written, cache_dir=cache) == file
    (file.parent / "other.safetensors").write_bytes(b"exit")
    with pytest.raises(ModelError, match=r"it has 2 \*.safetensors, expected one"):
        locate_exit(str(file.parent), cache_dir=cache)
    with pytest.raises(ModelError, match="no such file"):
        locate_exit(str(tmp_path / "none"), cache_dir=cache)
    with pytest.raises(ModelError, match="ftp:// cannot be opened here"):
        locate_exit("ftp://x/y", cache_dir=cache)


@for_stores()
def test_an_exit_is_fetched_as_a_model_is(kind: Kind) -> None:
    kind.put({NAME: b"the map", "README.md": b"not needed"})
    found = locate_exit(kind.uri, cache_dir=kind.cache)
    assert found.name == NAME and found.read_bytes() == b"the map"
    assert locate_exit(kind.uri, cache_dir=kind.cache) == found
    if kind.scheme != "oci":
        assert locate_exit(f"{kind.uri}/{NAME}", cache_dir=kind.cache).read_bytes() == b"the map"


def test_a_hub_gives_one_file_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.add("org/exits", {NAME: b"the map", "b.safetensors": b"another"})
        assert locate_exit(f"hf://org/exits/{NAME}", cache_dir=tmp_path).read_bytes() == b"the map"
        with pytest.raises(ModelError, match="it has 2"):
            locate_exit("hf://org/exits", cache_dir=tmp_path)
        with pytest.raises(ModelError, match=r"hf://org/name/file\.safetensors is expected"):
            locate_exit("hf://org/exits/exit.bin", cache_dir=tmp_path)
