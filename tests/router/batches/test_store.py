"""Files and batches in their folder: what is kept, what is deleted, and what a tenant sees."""

import io
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from phalanx_router.batches.records import Owner
from phalanx_router.batches.store import LIFETIME_S, RECORD_BYTES, BatchStore, StoreFull
from tests.router.batches.scene import BATCH, FILE, Api, BatchScene


async def test_a_deleted_file_ends_no_batch(scene: BatchScene) -> None:
    used = scene.store.used_bytes()
    scene.store.delete_file(FILE)
    assert scene.store.file(FILE, "alice") is None and 0 < scene.store.used_bytes() <= used
    async with scene.running(Api()):
        assert (await scene.ended("completed")).completed == 5
    scene.store.expire(2000)
    assert not scene.store.lines(BATCH, "input").exists()


def test_leftovers_of_crashes_are_deleted(scene: BatchScene, tmp_path: Path) -> None:
    other = f"batch_{9:032x}"
    kinds = ("input", "output", "errors", "lock", "cancel")
    names = [
        f"files/file-{9:032x}.data",
        "files/x.json.1.new",
        "batches/y.json.2.new",
        *(f"batches/{other}.{kind}" for kind in kinds),
    ]
    left = [tmp_path / name for name in names]
    for path in left:
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    scene.store.expire(1000)
    assert all(path.exists() for path in left), "an upload may be in progress"
    BatchStore(tmp_path, 1, leftover_s=0.0).expire(1000)
    assert not any(path.exists() for path in left) and scene.store.file(FILE, "alice") is not None
    assert scene.store.lines(BATCH, "input").exists()


def test_answers_to_publish_are_no_leftovers(scene: BatchScene, tmp_path: Path) -> None:
    file_id = f"file-{7:032x}"
    scene.store.save(replace(scene.batch(), status="finalizing", output_file_id=file_id))
    scene.store.content(file_id).write_bytes(b"{}\n")
    BatchStore(tmp_path, 1, leftover_s=0.0).expire(1000)
    assert scene.store.content(file_id).exists()


def test_published_answers_always_have_a_record(scene: BatchScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash may end the router before or after the rename."""
    file_id, moves = f"file-{7:032x}", list[int]()
    scene.store.lines(BATCH, "output").write_bytes(b"{}\n")
    move = os.replace

    def watched(source: Path, target: Path) -> None:
        if target == scene.store.content(file_id):
            file = scene.store.file(file_id, "alice")
            assert file is not None
            moves.append(file.bytes)
        move(source, target)

    monkeypatch.setattr(os, "replace", watched)
    scene.store.publish(scene.batch(), "output", file_id, 1000)
    assert moves == [3] and scene.store.content(file_id).read_bytes() == b"{}\n"


def test_a_batch_that_cannot_be_stored_leaves_nothing(scene: BatchScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(scene.store, "save", full)
    id = f"batch_{5:032x}"
    with pytest.raises(OSError, match="no space"):
        scene.store.add_batch(replace(scene.batch(), id=id))
    assert not scene.store.lines(id, "input").exists() and scene.store.lines(BATCH, "input").exists()


def test_files_are_bounded_and_expire(scene: BatchScene, tmp_path: Path) -> None:
    size = RECORD_BYTES + 10
    small = BatchStore(tmp_path / "small", size)
    record = scene.store.file(FILE, "alice")
    assert record is not None
    record = replace(record, owner=Owner("alice"))
    small.add_file(replace(record, bytes=10), io.BytesIO(b"0123456789"))
    with pytest.raises(StoreFull, match=f"at most {size} bytes"):
        small.add_file(replace(record, id=f"file-{3:032x}", bytes=0), io.BytesIO())
    with pytest.raises(StoreFull):
        small.add_batch(replace(scene.batch(), owner=record.owner))
    assert len(small.files("alice")) == 1 and small.batches("alice") == []
    small.expire(1000 + LIFETIME_S - 1)
    assert small.used_bytes() == size
    small.expire(1000 + LIFETIME_S)
    assert small.used_bytes() == 0 and small.files("alice") == []


def test_a_tenant_has_half_of_the_bytes(scene: BatchScene, tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "small", 4 * RECORD_BYTES)
    record = scene.store.file(FILE, "alice")
    assert record is not None

    def add(number: int, tenant: str) -> None:
        owner = Owner(tenant, has_keys=True)
        store.add_file(replace(record, id=f"file-{number:032x}", bytes=0, owner=owner), io.BytesIO())

    add(1, "alice")
    add(2, "alice")
    with pytest.raises(StoreFull, match=f"of a tenant have at most {2 * RECORD_BYTES} bytes"):
        add(3, "alice")
    add(3, "bob")
    add(4, "bob")
    assert store.used_bytes() == 4 * RECORD_BYTES


def test_the_first_request_to_cancel_counts(scene: BatchScene, tmp_path: Path) -> None:
    assert scene.batch().cancelling_at is None
    scene.store.cancel(BATCH)
    os.utime(tmp_path / "batches" / f"{BATCH}.cancel", (2000, 2000))
    scene.store.cancel(BATCH)
    assert (scene.batch().status, scene.batch().cancelling_at) == ("cancelling", 2000)


def test_files_of_other_tenants_are_not_found(scene: BatchScene) -> None:
    store = scene.store
    assert store.file(FILE, "alice") is not None and store.batch(BATCH, "alice") is not None
    assert (
        store.file(FILE, "bob") is None
        and store.batch(BATCH, "") is None
        and store.files("bob") == []
        and store.batches("bob") == []
    )
    for id in ("../files/x", FILE.upper(), "", f"{FILE}.json", "file-1"):
        assert store.file(id, "alice") is None and store.batch(id, "alice") is None
