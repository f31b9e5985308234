"""Kinds of object stores, and the files of a model in each."""

import base64
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx_runtime.checkpoint.locate import LocalModel, locate
from tests.runtime.checkpoint.hub import HubHandler
from tests.runtime.checkpoint.stores import GcsHandler, RegistryHandler, S3Handler, StoreServer

WEIGHTS = bytes(range(256)) * 400
FILES = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"not needed"}
TITLE = "org.opencontainers.image.title"


def layer(store: StoreServer, content: bytes, title: str | None, **more: str) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    store.objects[f"/v2/team/tiny/blobs/{digest}"] = content
    kind = more.pop("kind", "application/octet-stream")
    annotations = ({TITLE: title} if title else {}) | more
    return {"mediaType": kind, "digest": digest, "size": len(content), "annotations": annotations}


def manifest(store: StoreServer, layers: list[dict[str, object]], reference: str = "v1") -> str:
    """Stores a manifest by tag and by digest; returns the digest."""
    body = json.dumps({"schemaVersion": 2, "layers": layers}).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    for name in (reference, digest):
        store.objects[f"/v2/team/tiny/manifests/{name}"] = body
    return digest


def tar(files: dict[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == link:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@dataclass
class Kind:
    """A kind of object store with its server."""

    scheme: str
    store: StoreServer
    cache: Path
    set: Callable[[str, str], None]

    @property
    def uri(self) -> str:
        return f"oci://{self.store.host}/team/tiny:v1" if self.scheme == "oci" else f"{self.scheme}://models/team/tiny"

    def put(self, files: dict[str, bytes]) -> None:
        if self.scheme == "oci":
            manifest(self.store, [layer(self.store, content, name) for name, content in files.items()])
        else:
            self.store.objects |= {f"team/tiny/{name}": content for name, content in files.items()}

    def path_end(self, content: bytes, name: str) -> str:
        """Returns the end of the request path of a file."""
        names = {"oci": f"/v2/team/tiny/blobs/sha256:{hashlib.sha256(content).hexdigest()}"}
        return names.get(self.scheme, name)

    def fault(self, content: bytes, name: str) -> str:
        """Returns the key of a file in the server's faults."""
        return self.path_end(content, name).rsplit("/", 1)[-1] if self.scheme != "oci" else self.path_end(content, name)

    def set_secret(self, secret: str) -> None:
        """Sets the runtime's credentials, as the operator does."""
        if self.scheme == "s3":
            self.set("AWS_ACCESS_KEY_ID", "AKID")
            self.set("AWS_SECRET_ACCESS_KEY", secret)
        elif self.scheme == "gs":
            self.set("GOOGLE_OAUTH_ACCESS_TOKEN", secret)
        else:
            auth = base64.b64encode(f"bot:{secret}".encode()).decode()
            (self.cache / "docker").mkdir(exist_ok=True)
            (self.cache / "docker" / "config.json").write_text(json.dumps({"auths": {self.store.host: {"auth": auth}}}))

    def locate(self) -> LocalModel:
        return locate(self.uri, cache_dir=self.cache)


HANDLERS: dict[str, type[HubHandler]] = {"s3": S3Handler, "gs": GcsHandler, "oci": RegistryHandler}


def for_stores(*schemes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", schemes or list(HANDLERS), indirect=True)


def downloaded_names(folder: Path) -> list[str]:
    """Returns snapshot and weight files in the folder, without those of incomplete downloads."""
    return sorted(
        p.name for p in folder.rglob("*") if p.is_file() and ("safetensors" in p.name or not str(p.parent).endswith(".part"))
    )
