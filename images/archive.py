"""Writes OCI image archives with the standard library: layers from folders, several images in one archive.

Equal input gives equal bytes: times, owner names and file order are fixed. `ctr images import`, skopeo and podman read the
archives. Layers are files, shared between images by digest and never held in memory.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CHUNK_BYTES = 1 << 20
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: an uncompressed tar file and its digest."""

    path: Path
    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """One image: its full name, with a host part, and the command of its containers."""

    name: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"


def write_layer(root: Path, out: Path, owner: int = 0, owned: Collection[str] = ()) -> Layer:
    """Writes everything below `root` to `out`, returned as a layer; paths in `owned` (no leading slash) belong to `owner`."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = 0
        info.uid = info.gid = owner if info.name in owned else 0
        info.uname = info.gname = ""
        info.pax_headers = {}
        return info

    part = out.with_name(out.name + ".part")
    with tarfile.open(part, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _sorted_tree(root):
            tar.add(path, arcname=str(path.relative_to(root)), recursive=False, filter=plain)
    part.rename(out)
    return read_layer(out)


def _sorted_tree(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        found += [Path(folder, name) for name in (*folders, *files)]
    return sorted(found)


def read_layer(path: Path) -> Layer:
    """Returns the layer in a tar file."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
    return Layer(path, digest.hexdigest(), path.stat().st_size)


def check_name(name: str) -> None:
    """Raises ValueError for a name without a tag, or one that a container runtime would look up in the public hub."""
    host, slash, rest = name.partition("/")
    if not slash or not (host == "localhost" or "." in host or ":" in host) or ":" not in rest:
        raise ValueError(f"image name {name!r}: expected HOST/NAME:TAG, such as localhost/web:1")


def write_archive(out: Path, images: Sequence[Image], known: Collection[Layer] = ()) -> None:
    """Writes one archive with all images, each layer once, without the layers in `known`, which the reader has."""
    small: dict[str, bytes] = {}

    def put(document: object, media_type: str) -> dict[str, object]:
        content = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        digest = hashlib.sha256(content).hexdigest()
        small[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    entries = []
    for image in images:
        check_name(image.name)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": put(_config(image), CONFIG_TYPE),
            "layers": [{"mediaType": LAYER_TYPE, "digest": f"sha256:{x.sha256}", "size": x.num_bytes} for x in image.layers],
        }
        names = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name.rpartition(":")[2]}
        entries.append({**put(manifest, MANIFEST_TYPE), "platform": _platform(), "annotations": names})
    index = {"schemaVersion": 2, "manifests": entries}
    layers = {layer.sha256: layer for image in images for layer in image.layers if layer not in known}

    part = out.with_name(out.name + ".part")
    with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps(index, sort_keys=True).encode())
        for digest, content in sorted(small.items()):
            _add(tar, f"blobs/sha256/{digest}", content)
        for digest, layer in sorted(layers.items()):
            info = tarfile.TarInfo(f"blobs/sha256/{digest}")
            info.size = layer.num_bytes
            with layer.path.open("rb") as file:
                tar.addfile(info, file)
    part.rename(out)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _platform() -> dict[str, str]:
    machine = platform.machine()
    return {"architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine), "os": "linux"}


def _config(image: Image) -> dict[str, object]:
    run: dict[str, object] = {
        "Env": [f"{name}={value}" for name, value in {"PATH": PATH, **image.env}.items()],
        "WorkingDir": image.workdir,
    }
    if image.entrypoint:
        run["Entrypoint"] = list(image.entrypoint)
    if image.command:
        run["Cmd"] = list(image.command)
    if image.user:
        run["User"] = image.user
    diffs = [f"sha256:{layer.sha256}" for layer in image.layers]
    return {**_platform(), "config": run, "rootfs": {"type": "layers", "diff_ids": diffs}}
