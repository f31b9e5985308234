"""Hub downloads with faults of networks, hubs, tokens and disks: recovered, or reported with their reason."""

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx_api.conditions import Reason
from phalanx_operator.decide.conditions.model import download_failure
from phalanx_runtime.checkpoint.folder import make_once
from phalanx_runtime.checkpoint.sources.hub import download
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.hub import FILES, NAME, WEIGHTS, HubServer, fetch, hub_at


def test_pinned_commit_is_fetched_once_then_offline(server: HubServer, tmp_path: Path) -> None:
    old = server.add(NAME, FILES)
    server.add(NAME, FILES | {"config.json": b'{"model_type": "newer"}'})
    snapshot = fetch(server, tmp_path, revision=old)
    assert (snapshot.dir / "config.json").read_bytes() == FILES["config.json"]
    num_requests = len(server.requests)
    assert fetch(server, tmp_path, revision=old) == snapshot
    assert len(server.requests) == num_requests


def test_unreachable_hub_serves_the_cached_snapshot(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    first = fetch(server, tmp_path)
    server.errors["main"] = [503] * 9
    messages: list[str] = []
    assert download(hub_at(server.endpoint, progress=messages), NAME, None, tmp_path) == first
    assert "serving the last downloaded version" in messages[-1]


def test_unreachable_hub_without_snapshot_is_an_error(server: HubServer, tmp_path: Path) -> None:
    server.errors["main"] = [503] * 9
    with pytest.raises(ModelError, match=rf"{server.endpoint}: gave up after 5 attempts: HTTP 503"):
        fetch(server, tmp_path)


@pytest.mark.parametrize("with_etag", [True, False], ids=["etag", "no-etag"])
def test_interrupted_download_resumes(server: HubServer, tmp_path: Path, with_etag: bool) -> None:
    server.omits_etag = not with_etag
    server.add(NAME, FILES)
    server.cut_after["model.safetensors"] = [100_000, 100_000]
    snapshot = fetch(server, tmp_path)
    assert (snapshot.dir / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [request.range for request in server.requests_for("model.safetensors")]
    assert ranges == [None, "bytes=100000-", "bytes=200000-"]
    assert all((request.if_range is not None) == with_etag for request in server.requests_for("model.safetensors")[1:])


def test_later_process_resumes_a_killed_download(server: HubServer, tmp_path: Path) -> None:
    commit = server.add(NAME, FILES)
    part = tmp_path / "org--tiny" / f"{commit}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors.incomplete").write_bytes(WEIGHTS[:77_777])
    snapshot = fetch(server, tmp_path)
    assert (snapshot.dir / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.range for request in server.requests_for("model.safetensors")] == ["bytes=77777-"]
    assert not part.exists()


@pytest.mark.parametrize(
    "left_over",
    [WEIGHTS[:10].swapcase() + b"x" * 1000, WEIGHTS + b"too long"],
    ids=["other-bytes", "longer-than-the-file"],
)
def test_a_useless_left_over_is_thrown_away(server: HubServer, tmp_path: Path, left_over: bytes) -> None:
    commit = server.add(NAME, FILES)
    part = tmp_path / "org--tiny" / f"{commit}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors.incomplete").write_bytes(left_over)
    assert (fetch(server, tmp_path).dir / "model.safetensors").read_bytes() == WEIGHTS


def test_file_changed_since_the_interruption_is_fetched_whole(server: HubServer, tmp_path: Path) -> None:
    server.changes_etag = True
    server.add(NAME, FILES)
    server.cut_after["model.safetensors"] = [1000]
    assert (fetch(server, tmp_path).dir / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.status for request in server.requests_for("model.safetensors")] == [200, 200]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"], ids=["sha256", "git-sha1"])
def test_a_wrong_hash_is_refused_and_leaves_no_snapshot(server: HubServer, tmp_path: Path, name: str) -> None:
    commit = server.add(NAME, FILES)
    server.corrupt.add(name)
    with pytest.raises(ModelError, match=rf"{name} is corrupt: its (git )?SHA-\d+ is"):
        fetch(server, tmp_path)
    assert not (tmp_path / "org--tiny" / commit).exists()
    server.corrupt.clear()
    assert (fetch(server, tmp_path).dir / name).read_bytes() == FILES[name]


def test_hub_that_always_disconnects_is_given_up(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.cut_after["model.safetensors"] = [0] * 99
    with pytest.raises(ModelError, match=r"model.safetensors: gave up after 5 attempts"):
        fetch(server, tmp_path)
    assert len(server.requests_for("model.safetensors")) == 5


def test_passing_trouble_is_waited_out(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.errors = {"main": [503, 429], "config.json": [500, 502, 429]}
    assert (fetch(server, tmp_path).dir / "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (None, r"org/tiny at revision main .* private, gated or does not exist: set HF_TOKEN .*spec.model.secretRef"),
        ("bad", r"refuses the token for org/tiny at revision main .*: check HF_TOKEN"),
    ],
    ids=["no-token", "wrong-token"],
)
def test_a_private_repository_without_its_token_names_the_secret(
    server: HubServer, tmp_path: Path, token: str | None, reason: str
) -> None:
    server.add(NAME, FILES)
    server.private[NAME] = "good"
    with pytest.raises(ModelError, match=reason) as caught:
        fetch(server, tmp_path, token=token)
    assert token is None or token not in str(caught.value)
    assert download_failure(str(caught.value)) is Reason.AUTH_FAILED, "the operator matches these words"


def test_a_private_repository_opens_with_its_token(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.private[NAME] = "good"
    assert (fetch(server, tmp_path, token="good").dir / "config.json").exists()


def test_token_is_not_sent_to_redirect_hosts(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.private[NAME] = "good"
    server.redirect_to = server.endpoint.replace("127.0.0.1", "localhost")
    server.cut_after["model.safetensors"] = [1000]
    assert (fetch(server, tmp_path, token="good").dir / "model.safetensors").read_bytes() == WEIGHTS
    served = [request for request in server.requests_for("model.safetensors") if request.status in (200, 206)]
    assert [request.authorization for request in served] == [None, None]
    assert [request.range for request in served] == [None, "bytes=1000-"]


@pytest.mark.parametrize(
    ("name", "revision", "reason"),
    [
        ("org/other", None, "there is no model org/other at revision main on http"),
        (NAME, "v9", "there is no model org/tiny at revision v9 on http"),
    ],
    ids=["repository", "revision"],
)
def test_missing_file_or_repository_is_named(
    server: HubServer, tmp_path: Path, name: str, revision: str | None, reason: str
) -> None:
    server.add(NAME, FILES)
    with pytest.raises(ModelError, match=reason) as caught:
        download(hub_at(server.endpoint), name, revision, tmp_path)
    assert download_failure(str(caught.value)) is Reason.NOT_FOUND


def test_listed_but_missing_file_ends_the_download(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.errors["tokenizer.json"] = [404]
    with pytest.raises(ModelError, match=r"there is no file tokenizer.json in org/tiny"):
        fetch(server, tmp_path)


def test_unexpected_response_is_reported(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    server.errors["main"] = [418]
    with pytest.raises(ModelError, match="answers HTTP 418 for org/tiny"):
        fetch(server, tmp_path)


def test_server_that_is_no_hub_is_reported(server: HubServer, tmp_path: Path) -> None:
    server.errors["main"] = [200]
    with pytest.raises(ModelError, match="is no model hub"):
        fetch(server, tmp_path)


@pytest.mark.parametrize("endpoint", ["http://[broken", "nonsense"], ids=["no-url", "no-scheme"])
def test_invalid_endpoint_is_reported(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ModelError, match=r"nonsense|broken"):
        download(hub_at(endpoint), NAME, None, tmp_path)


def test_stop_ends_a_download(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    hub = hub_at(server.endpoint)
    stopping = replace(hub, control=replace(hub.control, progress=lambda message: hub.control.stop.set()))
    with pytest.raises(ModelError, match="stopped"):
        download(stopping, NAME, None, tmp_path)
    assert (fetch(server, tmp_path).dir / "model.safetensors").read_bytes() == WEIGHTS


def test_stop_ends_the_wait_before_another_attempt(server: HubServer, tmp_path: Path) -> None:
    server.errors["main"] = [503] * 9
    hub = hub_at(server.endpoint)
    hub.control.stop.set()
    with pytest.raises(ModelError, match="stopped"):
        download(hub, NAME, None, tmp_path)
    assert len(server.requests) == 1


def test_too_little_disk_space_is_reported_before_downloading(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    listing = json.loads(server.listing(NAME, server.branches[(NAME, "main")]))
    listing["siblings"][3]["size"] = 10**18
    server.listing = lambda repository, commit: json.dumps(listing).encode()  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"too full for org/tiny: 1000000000.0 GB are needed"):
        fetch(server, tmp_path)
    assert not server.requests_for("model.safetensors")


def test_full_disk_is_reported(tmp_path: Path) -> None:
    def full(part: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"disk of .* is full .* GB free"):
        make_once(tmp_path / "x", full, threading.Event())


def test_unwritable_cache_is_reported(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(ModelError, match=r"cannot write .*cache"):
        fetch(server, tmp_path / "cache")


def test_unwritable_references_are_reported(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, FILES)
    (tmp_path / "org--tiny").mkdir()
    (tmp_path / "org--tiny" / "refs").write_bytes(b"a file")
    with pytest.raises(ModelError, match=r"cannot write .*refs"):
        fetch(server, tmp_path)
