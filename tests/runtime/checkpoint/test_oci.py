"""oci:// against a local registry: tokens, manifests, archives, layers, credentials."""

import gzip
import json
from pathlib import Path

import httpx
import pytest

from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.sources import oci
from phalanx_runtime.checkpoint.sources.oci import Credentials, RegistryAuth, read_credentials
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.store_kinds import FILES, WEIGHTS, Kind, for_stores, layer, manifest, tar


@for_stores("oci")
def test_expired_token_is_renewed_during_a_download(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.set_secret("right")
    kind.store.cut_after[kind.fault(WEIGHTS, "")] = [40_000]
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    assert len(kind.store.requests_for("pull")) >= 2
    assert kind.store.fetched(kind.path_end(WEIGHTS, "")) == len(WEIGHTS)


@for_stores("oci")
def test_digest_pins_the_manifest_then_works_offline(kind: Kind) -> None:
    digest = manifest(kind.store, [layer(kind.store, content, name) for name, content in FILES.items()])
    uri = kind.uri.replace(":v1", f"@{digest}")
    found = locate(uri, cache_dir=kind.cache)
    assert (found.source, found.version) == (uri, digest)
    num_requests = len(kind.store.requests)
    assert locate(uri, cache_dir=kind.cache) == found and len(kind.store.requests) == num_requests


@for_stores("oci")
def test_another_manifest_than_the_digest_is_refused(kind: Kind) -> None:
    digest = manifest(kind.store, [])
    kind.store.objects[f"/v2/team/tiny/manifests/{digest}"] = b'{"layers": []}'
    with pytest.raises(ModelError, match="the manifest is corrupt"):
        locate(kind.uri.replace(":v1", f"@{digest}"), cache_dir=kind.cache)


@for_stores("oci")
def test_archives_are_unpacked_from_the_folder_of_the_model(kind: Kind) -> None:
    first = tar({"etc/config.json": b"{}", "etc/passwd": b"x", "./models/config.json": b"old", "../../evil": b"x"})
    second = {"./models/config.json": b"{}", "./models/model.safetensors": WEIGHTS, "./models/notes.txt": b"x"}
    kinds = ("application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.layer.v1.tar+gzip")
    layers = [layer(kind.store, first, None, kind=kinds[0]), layer(kind.store, gzip.compress(tar(second)), None, kind=kinds[1])]
    inner = manifest(kind.store, [*layers, layer(kind.store, b"{}", "tokenizer.json")], "inner")
    others: dict[str, object] = {"manifests": [{"digest": "no", "platform": {"os": "unknown"}}, {"digest": inner}]}
    kind.store.objects["/v2/team/tiny/manifests/v1"] = json.dumps(others).encode()
    found = kind.locate().dir
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found / "config.json").read_bytes() == b"{}" and (found / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(kind.cache.rglob("evil"))


@for_stores("oci")
def test_the_index_of_an_archive_names_its_weights(kind: Kind) -> None:
    index = json.dumps({"weight_map": {"a": "layers.safetensors"}}).encode()
    small = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": index}
    archive = tar(small | {"consolidated.safetensors": b"the same", "layers.safetensors": WEIGHTS})
    manifest(kind.store, [layer(kind.store, archive, None, kind="application/vnd.oci.image.layer.v1.tar")])
    found = kind.locate().dir
    assert {path.name for path in found.iterdir()} == {*small, "layers.safetensors"}


@for_stores("oci")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tar({"../config.json": b"{}", "../model.safetensors": b"x"}), "unsafe name"),
        (tar(FILES, link="model.safetensors"), "is a link or a device"),
        (tar({"model.safetensors": b"x"}), "have no config.json"),
        (tar({"config.json": b"{}"}), r"has no \*.safetensors"),
        (b"no archive", "cannot read an archive"),
        (gzip.compress(tar({"config.json": b"{}"})[:1024])[:-8] + b"\0" * 8, "cannot read an archive: CRC check failed"),
    ],
    ids=["climbs", "link", "no-config", "no-weights", "no-archive", "checksum"],
)
def test_unsafe_archive_is_reported(kind: Kind, content: bytes, words: str) -> None:
    manifest(kind.store, [layer(kind.store, content, None, kind="application/vnd.oci.image.layer.v1.tar")])
    with pytest.raises(ModelError, match=words):
        kind.locate()
    assert not list(kind.cache.rglob("model.safetensors"))


@for_stores("oci")
@pytest.mark.parametrize(
    ("change", "words"),
    [({"digest": "sha512:00"}, "only sha256 is supported"), ({"annotations": {}}, "neither a named file nor tar")],
)
def test_unknown_layer_is_reported(kind: Kind, change: dict[str, object], words: str) -> None:
    manifest(kind.store, [layer(kind.store, b"x", "config.json") | change])
    with pytest.raises(ModelError, match=words):
        kind.locate()


def test_default_registry_uses_its_api_host() -> None:
    address = oci.parse_address("docker.io/team/tiny:v1")
    assert address.base_url == "https://registry-1.docker.io/v2/team/tiny"


@pytest.mark.parametrize("content", ["[]", '{"auths": {"r.example": {"auth": "%"}}}', '{"auths": {"r.example": {}}}'])
def test_unreadable_credentials_are_reported(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"credentials for r\.example cannot be read"):
        read_credentials({"DOCKER_CONFIG": str(tmp_path)}, "r.example")


def test_credentials_go_to_no_plain_address() -> None:
    def challenge(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, headers={"WWW-Authenticate": 'Bearer realm="http://elsewhere.example/token"'}, request=request)

    auth = RegistryAuth("oci://r.example/a:b", "r.example", Credentials("bot", "secret"))
    client = httpx.Client(transport=httpx.MockTransport(challenge), auth=auth)
    with client, pytest.raises(ModelError, match="which is no https address"):
        client.get("https://r.example/v2/")
