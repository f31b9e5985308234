"""Adapters from hubs, stores and registries, with the credentials of a mounted Secret."""

import base64
import json
import os
import threading
from pathlib import Path

import pytest

from phalanx_api.wire import DeclaredAdapter
from phalanx_runtime.checkpoint.adapter import adapter_hash
from phalanx_runtime.engine.adapters.relay import AdapterRefused, LocalAdapter
from phalanx_runtime.server.http.adapter_sources import AdapterSource
from tests.runtime.checkpoint.hub import HubServer
from tests.runtime.checkpoint.store_kinds import Kind, for_stores, layer, manifest, tar

CONFIG = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}).encode()
ADAPTER = {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"weights"}
FILES = ADAPTER | {"config.json": b"{}", "model.safetensors": b"the base model", "tokenizer.json": b"{}", "README.md": b"text"}
"""Repositories may have the base model too."""


def fetch(folder: Path, uri: str, *, secret: str = "", key: str = "token", max_rank: int = 8, revision: str = "") -> LocalAdapter:
    source = AdapterSource(
        cache_dir=folder / "cache",
        max_rank=max_rank,
        environment=os.environ,
        secrets_dir=folder / "secrets",
        stop=threading.Event(),
    )
    return source.fetch(DeclaredAdapter("legal", uri, revision=revision, secret=secret, secret_key=key))


def mount(folder: Path, name: str, **keys: str) -> None:
    """Writes a Secret as the kubelet mounts it."""
    (folder / "secrets" / name).mkdir(parents=True)
    for key, value in keys.items():
        (folder / "secrets" / name / key).write_text(value + "\n")


def names(local: LocalAdapter) -> set[str]:
    return {path.name for path in Path(local.path).iterdir()}


def mount_for(kind: Kind, folder: Path, name: str, secret: str) -> None:
    auth = base64.b64encode(f"bot:{secret}".encode()).decode()
    keys = {
        "s3": {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": secret},
        "gs": {"token": secret},
        "oci": {".dockerconfigjson": json.dumps({"auths": {kind.store.host: {"auth": auth}}})},
    }
    mount(folder, name, **keys[kind.scheme])


@for_stores()
def test_stores_give_adapters_by_the_mounted_secret(kind: Kind, tmp_path: Path) -> None:
    """Also if the model has other credentials."""
    kind.store.secret = "right"
    kind.put(FILES)
    kind.set_secret("of the model")
    for name in ("right", "wrong"):
        mount_for(kind, tmp_path, name, name)
    with pytest.raises(AdapterRefused) as refused:
        fetch(tmp_path, kind.uri, secret="wrong")
    assert not refused.value.is_final
    local = fetch(tmp_path, kind.uri, secret="right")
    assert names(local) == set(ADAPTER)
    assert local.adapter.content_hash == adapter_hash(Path(local.path))


@for_stores("oci")
def test_archives_give_adapters(kind: Kind, tmp_path: Path) -> None:
    content = tar({"models/legal/" + name: content for name, content in FILES.items()})
    manifest(kind.store, [layer(kind.store, content, None, kind="application/vnd.oci.image.layer.v1.tar")])
    assert names(fetch(tmp_path, kind.uri)) == set(ADAPTER)


def test_hub_gives_adapters_by_the_mounted_secret(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    server.add("org/legal", FILES, branch="v2")
    server.private["org/legal"] = "right"
    mount(tmp_path, "hub", read="right")
    local = fetch(tmp_path, "hf://org/legal", secret="hub", key="read", revision="v2")
    assert names(local) == set(ADAPTER) and not server.requests_for("/model.safetensors")
    for secret, key, reason in (
        ("hub", "other", "the Secret hub has no readable key other"),
        ("unknown", "read", "the Secret unknown is not mounted: name it in spec.engine.adapterSecrets"),
        ("", "read", r"is private, gated or does not exist.*spec\.adapters\[\]\.secretRef"),
    ):
        with pytest.raises(AdapterRefused, match=reason) as refused:
            fetch(tmp_path, "hf://org/legal", secret=secret, key=key)
        assert not refused.value.is_final


@pytest.mark.parametrize(
    ("files", "max_rank", "reason", "is_final"),
    [
        (ADAPTER, 2, "r 4 exceeds --max-lora-rank 2", True),
        ({"config.json": b"{}"}, 8, "is no adapter: it has no adapter_config.json and no adapter_model.safetensors", False),
    ],
)
def test_unusable_repositories_are_refused_with_the_reason(
    server: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    max_rank: int,
    reason: str,
    is_final: bool,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    server.add("org/legal", files)
    with pytest.raises(AdapterRefused, match=reason) as refused:
        fetch(tmp_path, "hf://org/legal", max_rank=max_rank)
    assert refused.value.is_final is is_final
    assert not is_final or str(tmp_path) not in str(refused.value)


def test_folders_of_the_pod_give_adapters(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"has no adapter_config\.json") as refused:
        fetch(tmp_path, f"file://{tmp_path}/legal")
    assert not refused.value.is_final
    (tmp_path / "legal").mkdir()
    for name, content in ADAPTER.items():
        (tmp_path / "legal" / name).write_bytes(content)
    assert fetch(tmp_path, f"file://{tmp_path}/legal").path == str(tmp_path / "legal")
    with pytest.raises(AdapterRefused, match="ftp:// cannot be opened here"):
        fetch(tmp_path, "ftp://host/legal")
