"""s3://, gs:// and oci:// against local HTTP servers: authentication, pages, interruptions, digests, unsafe names."""

import base64
import hashlib
import json
import threading
from pathlib import Path

import pytest

from phalanx_api.conditions import Reason
from phalanx_operator.decide.conditions.model import download_failure
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.store_kinds import FILES, WEIGHTS, Kind, downloaded_names, for_stores


@for_stores()
def test_only_needed_files_are_fetched_once(kind: Kind) -> None:
    kind.put(FILES)
    found = kind.locate()
    assert sorted(path.name for path in found.dir.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.dir / "model.safetensors").read_bytes() == WEIGHTS
    uri = kind.uri.removesuffix(":v1")
    assert found.version and found.source == f"{uri}@{found.version}"
    assert kind.locate() == found
    assert kind.store.fetched(kind.path_end(WEIGHTS, "model.safetensors")) == len(WEIGHTS)


@for_stores()
def test_changed_files_are_fetched_again(kind: Kind) -> None:
    kind.put(FILES)
    first = kind.locate()
    kind.put(FILES | {"config.json": b'{"a": 2}'})
    second = kind.locate()
    assert first.dir != second.dir and (second.dir / "config.json").read_bytes() == b'{"a": 2}'


@for_stores()
def test_a_secret_opens_a_private_source(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.set_secret("right")
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@for_stores()
@pytest.mark.parametrize("secret", [None, "wrong"])
def test_without_the_right_secret_the_error_names_the_source(kind: Kind, secret: str | None) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    if secret:
        kind.set_secret(secret)
    words = "refused|check the credentials" if secret else "spec.model.secretRef"
    with pytest.raises(ModelError, match=words) as caught:
        kind.locate()
    assert kind.uri in str(caught.value) and "wrong" not in str(caught.value)
    assert download_failure(str(caught.value)) is Reason.AUTH_FAILED, "the operator matches these words"


@for_stores()
def test_interrupted_download_fetches_no_byte_twice(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.cut_after[kind.fault(WEIGHTS, "model.safetensors")] = [40_000, 30_000]
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS
    end = kind.path_end(WEIGHTS, "model.safetensors")
    ranges = [request.range for request in kind.store.requests if request.path.split("?")[0].endswith(end) and request.sent_bytes]
    assert ranges == [None, "bytes=40000-", "bytes=70000-"]
    assert kind.store.fetched(end) == len(WEIGHTS)


@for_stores()
def test_a_wrong_digest_is_refused_and_leaves_nothing(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.corrupt.add(kind.path_end(WEIGHTS, "model.safetensors").rsplit("/", 1)[-1])
    with pytest.raises(ModelError, match=r"model.safetensors is corrupt: its (MD5|SHA-256) is"):
        kind.locate()
    assert [name for name in downloaded_names(kind.cache) if not name.endswith(".lock")] == []
    kind.store.corrupt.clear()
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@for_stores("s3", "gs")
def test_a_long_listing_is_read_page_by_page(kind: Kind) -> None:
    kind.store.page = 2
    shards = {f"model-{n}-of-5.safetensors": b"x" * n for n in range(1, 6)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": {str(n): name for n, name in enumerate(shards)}}).encode()}
    kind.put({"config.json": b"{}", "tokenizer.json": b"{}", "a b+c#d?.txt": b"", **shards, **index})
    assert len(list(kind.locate().dir.glob("*.safetensors"))) == 5
    assert sum("prefix" in request.path for request in kind.store.requests) == 5


@for_stores()
@pytest.mark.parametrize("name", ["../../tokenizer.json", "sub/../../config.json"])
def test_a_name_that_climbs_is_refused(kind: Kind, name: str) -> None:
    kind.put(FILES | {name: b"bad"})
    with pytest.raises(ModelError, match="unsafe name"):
        kind.locate()


@for_stores("s3", "gs")
def test_a_gguf_file_is_looked_for_in_its_folder(kind: Kind) -> None:
    kind.put({"a.gguf": b"GGUF"})
    with pytest.raises(ModelError, match=rf"to serve a GGUF file, write {kind.uri}/a.gguf"):
        kind.locate()
    with pytest.raises(ModelError, match=r"has no file b\.gguf"):
        locate(f"{kind.uri}/b.gguf", cache_dir=kind.cache)
    with pytest.raises(ModelError, match="GGUF"):
        locate(f"{kind.uri}/a.gguf", cache_dir=kind.cache)
    assert kind.store.fetched("a.gguf") == 4


@for_stores()
def test_missing_objects_are_named(kind: Kind) -> None:
    with pytest.raises(ModelError, match=r"nothing under this prefix|no such manifest") as caught:
        kind.locate()
    assert kind.uri in str(caught.value)


@for_stores()
def test_revision_is_refused_for_object_stores(kind: Kind) -> None:
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
def test_invalid_uri_is_reported(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is expected"):
        locate(uri, cache_dir=tmp_path)


@for_stores("s3")
def test_a_bucket_that_is_not_there_is_named(kind: Kind) -> None:
    with pytest.raises(ModelError, match=r"s3://other/x at http.*: there is no such bucket \(NoSuchBucket\)") as caught:
        locate("s3://other/x", cache_dir=kind.cache)
    assert download_failure(str(caught.value)) is Reason.NOT_FOUND


@for_stores("s3")
def test_incomplete_credentials_are_reported(kind: Kind) -> None:
    kind.set("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(ModelError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together"):
        kind.locate()


@for_stores("s3")
def test_a_session_token_is_signed(kind: Kind) -> None:
    kind.store.secret = "right"
    kind.put(FILES)
    kind.set_secret("right")
    kind.set("AWS_SESSION_TOKEN", "for a while")
    assert kind.locate().dir.is_dir()
    assert all("x-amz-security-token" in (request.authorization or "") for request in kind.store.requests)


@for_stores("s3")
@pytest.mark.parametrize("multipart", [True, False], ids=["several-parts", "encrypted"])
def test_multipart_etag_is_not_compared_as_md5(kind: Kind, multipart: bool) -> None:
    kind.put(FILES)
    kind.store.etags["team/tiny/model.safetensors"] = '"0123456789abcdef0123456789abcdef-2"' if multipart else f'"{"0" * 32}"'
    kind.store.head = {} if multipart else {"x-amz-server-side-encryption": "aws:kms"}
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@for_stores("s3")
def test_a_checksum_of_s3_is_checked(kind: Kind) -> None:
    kind.put({**FILES, "model.safetensors": WEIGHTS})
    kind.store.head = {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(b"other").digest()).decode()}
    with pytest.raises(ModelError, match=r"is corrupt: its SHA-256 is"):
        kind.locate()
    kind.store.head = {"x-amz-checksum-sha256": "?"}
    with pytest.raises(ModelError, match="returned an invalid SHA-256"):
        kind.locate()


@for_stores("gs")
def test_a_composite_object_is_checked_by_its_crc(kind: Kind) -> None:
    kind.put(FILES)
    kind.store.composite = {"team/tiny/model.safetensors"}
    kind.store.corrupt = {"model.safetensors"}
    with pytest.raises(ModelError, match=r"is corrupt: its CRC32C is"):
        kind.locate()
    kind.store.corrupt = set()
    assert (kind.locate().dir / "model.safetensors").read_bytes() == WEIGHTS


@for_stores("gs")
def test_machine_token_is_used_and_key_file_is_refused(kind: Kind) -> None:
    kind.store.secret = "of the machine"
    kind.put(FILES)
    kind.set("GCE_METADATA_HOST", kind.store.host)
    assert kind.locate().dir.is_dir()
    assert len(kind.store.requests_for("/token")) == 1
    kind.set("GOOGLE_APPLICATION_CREDENTIALS", "/key.json")
    with pytest.raises(ModelError, match="GOOGLE_APPLICATION_CREDENTIALS names a file that cannot be used"):
        kind.locate()


@for_stores()
def test_stop_ends_a_download(kind: Kind) -> None:
    kind.put(FILES)
    stop = threading.Event()
    with pytest.raises(ModelError, match="stopped"):
        locate(kind.uri, cache_dir=kind.cache, progress=lambda _: stop.set(), stop=stop)
