"""s3://, gs:// and oci:// over real HTTP, each against a small server: who asks, pages, cuts, digests, names that climb."""

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from phalanx_api.conditions import Reason
from phalanx_operator.decide.caching import cause_of
from phalanx_runtime.checkpoint import oci
from phalanx_runtime.checkpoint.locate import LocalModel, locate
from phalanx_runtime.checkpoint.oci_auth import Credentials, RegistryAuth, credentials_of
from phalanx_runtime.errors import ModelError
from tests.runtime.hub import HubHandler
from tests.runtime.stores import REGION, GcsHandler, RegistryHandler, S3Handler, StoreServer, running_store

WEIGHTS = bytes(range(256)) * 400
FILES = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"not needed"}
TITLE = "org.opencontainers.image.title"
VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"),
    *("GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"),
)


def layer(store: StoreServer, content: bytes, title: str | None, **more: str) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    store.objects[f"/v2/team/tiny/blobs/{digest}"] = content
    kind = more.pop("kind", "application/octet-stream")
    notes = ({TITLE: title} if title else {}) | more
    return {"mediaType": kind, "digest": digest, "size": len(content), "annotations": notes}


def manifest(store: StoreServer, layers: list[dict[str, object]], reference: str = "v1") -> str:
    """Puts a manifest under a tag and under its digest, which it gives."""
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
    """One kind of source with its server: how files get there, and how a secret is told."""

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
        """End of the path, in requests, of a file."""
        names = {"oci": f"/v2/team/tiny/blobs/sha256:{hashlib.sha256(content).hexdigest()}"}
        return names.get(self.scheme, name)

    def fault(self, content: bytes, name: str) -> str:
        """The file's name as the server's faults have it."""
        return self.path_end(content, name).rsplit("/", 1)[-1] if self.scheme != "oci" else self.path_end(content, name)

    def tell(self, secret: str) -> None:
        """Gives the runtime a secret, as the operator does."""
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


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    scheme: str = request.param
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with running_store(HANDLERS[scheme]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_REGION", REGION)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.host)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        yield Kind(scheme, store, tmp_path, monkeypatch.setenv)


def each(*schemes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", schemes or list(HANDLERS), indirect=True)


def left(folder: Path) -> list[str]:
    """Files that a refused download could have left: none is a snapshot, none is the bad file."""
    return sorted(
        p.name for p in folder.rglob("*") if p.is_file() and ("safetensors" in p.name or not str(p.parent).endswith(".part"))
    )


@each()
def test_only_what_serving_needs_is_fetched_and_only_once(kind: Kind) -> None:
    kind.put(FILES)
    found = kind.locate()
    assert sorted(path.name for path in found.dir.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.dir / "model.safetensors").read_bytes() == WEIGHTS
    assert found.source.startswith(kind.uri.removesuffix(":v1") + "@")
    assert kind.locate() == found
    assert kind.store.fetched(kind.path_end(WEIGHTS, "model.safetensors")) == len(WEIGHTS)


@each()
def test_what_changed_is_fetched_anew(kind: Kind) -> None:
    kind.put(FILES)
    first = kind.locate()
    kind.put(FILES | {"config.json": b'{"a": 2}'})
    second = kind.locate()
    assert first.dir != second.dir and (second.dir / "config.json").read_bytes() == b'{"a": 2}'


@each()
def test_a_secret_opens_a_private_source(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.tell("right")
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@each()
@pytest.mark.parametrize("secret", [None, "wrong"])
def test_without_the_right_secret_the_error_names_the_source(kind: Kind, secret: str | None) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    if secret:
        kind.tell(secret)
    words = "refused|check the credentials" if secret else "spec.model.secretRef"
    with pytest.raises(ModelError, match=words) as caught:
        kind.locate()
    assert kind.uri in str(caught.value) and "wrong" not in str(caught.value)
    assert cause_of(str(caught.value)) is Reason.AUTH_FAILED, "the operator knows it by these words"


@each()
def test_a_cut_download_goes_on_and_no_byte_is_fetched_twice(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.cut_after[kind.fault(WEIGHTS, "model.safetensors")] = [40_000, 30_000]
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    end = kind.path_end(WEIGHTS, "model.safetensors")
    ranges = [seen.range for seen in kind.store.seen if seen.path.split("?")[0].endswith(end) and seen.sent]
    assert ranges == [None, "bytes=40000-", "bytes=70000-"]
    assert kind.store.fetched(end) == len(WEIGHTS)


@each()
def test_a_wrong_digest_is_refused_and_leaves_nothing(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.wrong.add(kind.path_end(WEIGHTS, "model.safetensors").rsplit("/", 1)[-1])
    with pytest.raises(ModelError, match=r"model.safetensors arrived wrong: its (MD5|SHA-256) is"):
        kind.locate()
    assert [name for name in left(kind.cache) if not name.endswith(".lock")] == []
    kind.store.wrong.clear()
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@each("s3", "gs")
def test_a_long_listing_is_read_page_by_page(kind: Kind) -> None:
    kind.store.page = 2
    shards = {f"model-{n}-of-5.safetensors": b"x" * n for n in range(1, 6)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": {str(n): name for n, name in enumerate(shards)}}).encode()}
    kind.put({"config.json": b"{}", "tokenizer.json": b"{}", "a b+c#d?.txt": b"", **shards, **index})
    assert len(list(kind.locate().dir.glob("*.safetensors"))) == 5
    assert sum("prefix" in seen.path for seen in kind.store.seen) == 5


@each()
@pytest.mark.parametrize("name", ["../../tokenizer.json", "sub/../../config.json"])
def test_a_name_that_climbs_is_refused(kind: Kind, name: str) -> None:
    kind.put(FILES | {name: b"bad"})
    with pytest.raises(ModelError, match="unsafe name"):
        kind.locate()


@each("s3", "gs")
def test_a_gguf_file_is_looked_for_in_its_folder(kind: Kind) -> None:
    kind.put({"a.gguf": b"GGUF"})
    with pytest.raises(ModelError, match=rf"to serve a GGUF file, write {kind.uri}/a.gguf"):
        kind.locate()
    with pytest.raises(ModelError, match=r"has no file b\.gguf"):
        locate(f"{kind.uri}/b.gguf", cache_dir=kind.cache)
    with pytest.raises(ModelError, match="GGUF"):
        locate(f"{kind.uri}/a.gguf", cache_dir=kind.cache)
    assert kind.store.fetched("a.gguf") == 4


@each()
def test_what_is_not_there_is_named(kind: Kind) -> None:
    with pytest.raises(ModelError, match=r"nothing under this prefix|no such manifest") as caught:
        kind.locate()
    assert kind.uri in str(caught.value)


@each()
def test_a_revision_goes_with_a_hub_only(kind: Kind) -> None:
    with pytest.raises(ModelError, match="--revision goes with hf:// only"):
        locate(kind.uri, revision="main", cache_dir=kind.cache)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3://B/x",
        "gs://b",
        "gs://bu/../x",
        "s3://bu//x",
        "oci://r",
        "oci://r/n",
        "oci://r/n@sha256:12",
        "oci://r/../n:v1",
    ],
)
def test_an_address_that_is_none_is_told(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is expected"):
        locate(uri, cache_dir=tmp_path)


@each("s3")
def test_a_bucket_that_is_not_there_is_named(kind: Kind) -> None:
    with pytest.raises(ModelError, match=r"s3://other/x at http.*: there is no such bucket \(NoSuchBucket\)") as caught:
        locate("s3://other/x", cache_dir=kind.cache)
    assert cause_of(str(caught.value)) is Reason.NOT_FOUND


@each("s3")
def test_half_a_key_is_told(kind: Kind) -> None:
    kind.set("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(ModelError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together"):
        kind.locate()


@each("s3")
def test_a_session_token_is_signed(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.tell("right")
    kind.set("AWS_SESSION_TOKEN", "for a while")
    assert kind.locate().dir.is_dir()
    assert all("x-amz-security-token" in (seen.authorization or "") for seen in kind.store.seen)


@each("s3")
@pytest.mark.parametrize("multipart", [True, False], ids=["several-parts", "encrypted"])
def test_an_etag_that_is_no_md5_is_not_taken_for_one(kind: Kind, multipart: bool) -> None:
    kind.put(FILES)
    kind.store.etags["team/tiny/model.safetensors"] = '"0123456789abcdef0123456789abcdef-2"' if multipart else f'"{"0" * 32}"'
    kind.store.head = {} if multipart else {"x-amz-server-side-encryption": "aws:kms"}
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@each("s3")
def test_a_checksum_of_s3_is_checked(kind: Kind) -> None:
    kind.put({**FILES, "model.safetensors": WEIGHTS})
    kind.store.head = {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(b"other").digest()).decode()}
    with pytest.raises(ModelError, match=r"arrived wrong: its SHA-256 is"):
        kind.locate()
    kind.store.head = {"x-amz-checksum-sha256": "?"}
    with pytest.raises(ModelError, match="tells a SHA-256 that is none"):
        kind.locate()


@each("gs")
def test_a_composite_object_is_checked_by_its_crc(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.composite = {"team/tiny/model.safetensors"}
    kind.store.wrong = {"model.safetensors"}
    with pytest.raises(ModelError, match=r"arrived wrong: its CRC32C is"):
        kind.locate()
    kind.store.wrong = set()
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@each("gs")
def test_a_machine_has_its_own_token_and_a_key_file_is_refused(kind: Kind) -> None:
    kind.store.secret = "of the machine"
    kind.put(FILES)
    kind.set("GCE_METADATA_HOST", kind.store.host)
    assert kind.locate().dir.is_dir()
    assert len(kind.store.asked_for("/token")) == 1
    kind.set("GOOGLE_APPLICATION_CREDENTIALS", "/key.json")
    with pytest.raises(ModelError, match="GOOGLE_APPLICATION_CREDENTIALS names a file that cannot be used"):
        kind.locate()


@each("oci")
def test_a_token_that_ends_during_a_download_is_asked_for_again(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.tell("right")
    kind.store.cut_after[kind.fault(WEIGHTS, "")] = [40_000]
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    assert len(kind.store.asked_for("pull")) >= 2
    assert kind.store.fetched(kind.path_end(WEIGHTS, "")) == len(WEIGHTS)


@each("oci")
def test_a_digest_pins_the_manifest_and_then_needs_no_registry(kind: Kind) -> None:
    digest = manifest(kind.store, [layer(kind.store, content, name) for name, content in FILES.items()])
    uri = kind.uri.replace(":v1", f"@{digest}")
    found = locate(uri, cache_dir=kind.cache)
    assert found.source == uri
    asked = len(kind.store.seen)
    assert locate(uri, cache_dir=kind.cache) == found and len(kind.store.seen) == asked


@each("oci")
def test_another_manifest_than_the_digest_is_refused(kind: Kind) -> None:
    digest = manifest(kind.store, [])
    kind.store.objects[f"/v2/team/tiny/manifests/{digest}"] = b'{"layers": []}'
    with pytest.raises(ModelError, match="the manifest arrived wrong"):
        locate(kind.uri.replace(":v1", f"@{digest}"), cache_dir=kind.cache)


@each("oci")
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


@each("oci")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tar({"../config.json": b"{}", "../model.safetensors": b"x"}), "unsafe name"),
        (tar({"config.json": b"{}", "model.safetensors": b""}, link="model.safetensors"), "is a link or a device"),
        (tar({"model.safetensors": b"x"}), "hold no config.json"),
        (tar({"config.json": b"{}"}), r"has no \*.safetensors"),
        (b"no archive", "cannot be read"),
    ],
    ids=["climbs", "link", "no-config", "no-weights", "no-archive"],
)
def test_an_archive_that_is_not_to_be_unpacked_is_told(kind: Kind, content: bytes, words: str) -> None:
    manifest(kind.store, [layer(kind.store, content, None, kind="application/vnd.oci.image.layer.v1.tar")])
    with pytest.raises(ModelError, match=words):
        kind.locate()
    assert not list(kind.cache.rglob("model.safetensors"))


@each("oci")
@pytest.mark.parametrize(
    ("change", "words"),
    [({"digest": "sha512:00"}, "only sha256 is known"), ({"annotations": {}}, "neither a named file nor tar")],
)
def test_a_layer_that_is_not_known_is_told(kind: Kind, change: dict[str, object], words: str) -> None:
    manifest(kind.store, [layer(kind.store, b"x", "config.json") | change])
    with pytest.raises(ModelError, match=words):
        kind.locate()


def test_the_big_registry_is_asked_by_its_other_name() -> None:
    address = oci.address("docker.io/team/tiny:v1")
    assert address.base_url == "https://registry-1.docker.io/v2/team/tiny"


@pytest.mark.parametrize("content", ["[]", '{"auths": {"r.example": {"auth": "%"}}}', '{"auths": {"r.example": {}}}'])
def test_credentials_that_cannot_be_read_are_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"credentials for r\.example cannot be read"):
        credentials_of({"DOCKER_CONFIG": str(tmp_path)}, "r.example")


def test_credentials_go_to_no_plain_address() -> None:
    def challenge(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, headers={"WWW-Authenticate": 'Bearer realm="http://elsewhere.example/token"'}, request=request)

    auth = RegistryAuth("oci://r.example/a:b", "r.example", Credentials("bot", "secret"))
    client = httpx.Client(transport=httpx.MockTransport(challenge), auth=auth)
    with client, pytest.raises(ModelError, match="which is no https address"):
        client.get("https://r.example/v2/")


@each()
def test_stop_ends_a_download(kind: Kind) -> None:
    kind.put(FILES)
    stop = threading.Event()
    with pytest.raises(ModelError, match="stopped"):
        locate(kind.uri, cache_dir=kind.cache, progress=lambda _: stop.set(), stop=stop)
