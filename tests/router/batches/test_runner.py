"""Batches run to their end: whatever router runs them, each request is answered once."""

import asyncio
import io
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx_frontend.auth.caller import Caller
from phalanx_router.batches.batch_run import LOWEST_PRIORITY, RunParts
from phalanx_router.batches.local_call import LocalAnswer
from phalanx_router.batches.records import WINDOW_S, BatchRecord, FileRecord, Owner
from phalanx_router.batches.runner import BatchRunner, next_batches
from phalanx_router.batches.slots import Slots
from phalanx_router.batches.store import LIFETIME_S, BatchStore, StoreFull
from phalanx_router.program import check_batches
from phalanx_router.settings import BatchSettings
from tests.polling import until

CHAT = "/v1/chat/completions"
ALICE = Owner("alice", ["tiny"], True)
FILE, BATCH = f"file-{1:032x}", f"batch_{2:032x}"


@dataclass
class Api:
    """An API server that answers while `gate` is set."""

    answers: Callable[[dict[str, Any]], LocalAnswer] = lambda body: LocalAnswer(200, {}, json.dumps(body).encode())
    calls: list[tuple[dict[str, Any], Caller]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def call(self, path: str, body: bytes, caller: Caller) -> LocalAnswer:
        assert path == CHAT
        self.calls.append((json.loads(body), caller))
        await self.gate.wait()
        return self.answers(json.loads(body))


@dataclass
class Scene:
    """A store with one batch of `size` requests, and routers that run it."""

    store: BatchStore
    size: int = 5
    now_s: float = 1000.0
    is_leaving: bool = False

    def __post_init__(self) -> None:
        numbers = range(self.size)
        lines = [{"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": {"number": number}} for number in numbers]
        self.add_file("\n".join(map(json.dumps, lines)).encode())
        self.store.add_batch(
            BatchRecord(
                id=BATCH,
                owner=ALICE,
                endpoint=CHAT,
                input_file_id=FILE,
                metadata={},
                created_at=1000,
                expires_at=1000 + WINDOW_S,
            )
        )

    def add_file(self, content: bytes) -> FileRecord:
        record = FileRecord(
            id=FILE,
            owner=ALICE,
            filename="in.jsonl",
            purpose="batch",
            bytes=len(content),
            created_at=1000,
            expires_at=1000 + LIFETIME_S,
        )
        return self.store.add_file(record, io.BytesIO(content))

    @asynccontextmanager
    async def running(self, api: Api) -> AsyncIterator[BatchRunner]:
        slots = Slots(lambda in_flight: 4 - in_flight, tick_s=0.001)
        parts = RunParts(store=self.store, call=api.call, slots=slots, now=lambda: self.now_s, save_s=0.01, first_retry_s=0.001)
        runner = BatchRunner(parts, is_leaving=lambda: self.is_leaving)
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def batch(self) -> BatchRecord:
        found = self.store.batch(BATCH, "alice")
        assert found is not None
        return found

    async def ended(self, status: str) -> BatchRecord:
        await until(lambda: self.batch().status == status)
        return self.batch()

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        assert file_id is not None
        lines = [json.loads(line) for line in self.store.content(file_id).read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(BatchStore(tmp_path, 1 << 20))


async def test_each_request_is_answered_at_the_lowest_priority(scene: Scene) -> None:
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("completed")
    assert (batch.total, batch.completed, batch.failed, batch.error_file_id) == (5, 5, 0, None)
    answers = scene.lines(batch.output_file_id)
    assert {id: line["response"]["body"] for id, line in answers.items()} == {f"line-{n}": {"number": n} for n in range(5)}
    for _, caller in api.calls:
        assert caller.tenant("other", None) == "alice" and caller.priority(None) == LOWEST_PRIORITY
        assert caller.may_use("tiny") and not caller.may_use("other")


async def test_failed_requests_are_in_a_file_of_their_own(scene: Scene) -> None:
    def answer(body: dict[str, Any]) -> LocalAnswer:
        return LocalAnswer(400 if body["number"] % 2 else 200, {}, b'{"error": {"message": "no"}}')

    async with scene.running(Api(answer)):
        batch = await scene.ended("completed")
    assert (batch.completed, batch.failed) == (3, 2)
    errors = scene.lines(batch.error_file_id)
    assert set(errors) == {"line-1", "line-3"} and errors["line-1"]["response"]["status_code"] == 400
    file = scene.store.file(batch.error_file_id or "", "alice")
    assert file is not None and (file.purpose, file.filename) == ("batch_output", f"{BATCH}_errors.jsonl")


async def test_another_router_continues_after_a_loss(scene: Scene) -> None:
    first = Api()

    def answer_two(body: dict[str, Any]) -> LocalAnswer:
        if body["number"] >= 1:
            first.gate.clear()
        return LocalAnswer(200, {}, b'{"by": "first"}')

    first.answers = answer_two
    async with scene.running(first):
        await until(lambda: scene.store.lines(BATCH, "output").exists() and scene.store.lines(BATCH, "output").stat().st_size > 0)
    with scene.store.lines(BATCH, "output").open("ab") as file:
        file.write(b'{"custom_id": "line-4", "resp')  # a crash cuts the last line short
    second = Api(lambda body: LocalAnswer(200, {}, b'{"by": "second"}'))
    async with scene.running(second):
        batch = await scene.ended("completed")
    by = [line["response"]["body"]["by"] for line in scene.lines(batch.output_file_id).values()]
    assert sorted(by) == ["first"] * by.count("first") + ["second"] * by.count("second")
    assert by.count("first") >= 1 and len(by) == 5 == batch.completed


async def test_a_batch_has_one_runner(scene: Scene) -> None:
    first, second = Api(), Api()
    first.gate.clear()
    second.gate.clear()
    async with scene.running(first), scene.running(second):
        await until(lambda: len(first.calls) + len(second.calls) == 4)
        await asyncio.sleep(0.05)
        assert [] in (first.calls, second.calls)
        first.gate.set()
        second.gate.set()
        batch = await scene.ended("completed")
    assert batch.completed == 5


async def test_a_leaving_router_aborts_its_requests(scene: Scene) -> None:
    """So its shutdown does not wait for them, and another one runs the batch."""
    leaving, other = Api(), Api()
    leaving.gate.clear()
    async with scene.running(leaving) as runner:
        await until(lambda: len(leaving.calls) == 4)
        scene.is_leaving = True
        await until(lambda: not runner.num_running)
    scene.is_leaving = False
    async with scene.running(other):
        assert (await scene.ended("completed")).completed == 5
    assert len(other.calls) == 5


async def test_a_runner_survives_a_lost_folder(scene: Scene, tmp_path: Path) -> None:
    tmp_path.rename(tmp_path.parent / "moved")
    async with scene.running(Api()):
        await asyncio.sleep(0.05)
        (tmp_path.parent / "moved").rename(tmp_path)
        assert (await scene.ended("completed")).completed == 5


async def test_busy_groups_are_asked_again(scene: Scene) -> None:
    seen = dict[int, int]()

    def answer(body: dict[str, Any]) -> LocalAnswer:
        seen[body["number"]] = seen.get(body["number"], 0) + 1
        return LocalAnswer(200 if seen[body["number"]] > 2 else 503, {}, b"{}")

    async with scene.running(Api(answer)):
        batch = await scene.ended("completed")
    assert batch.completed == 5 and set(seen.values()) == {3}


@pytest.mark.parametrize(("status", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
async def test_the_rest_of_an_ended_batch_fails(scene: Scene, status: str, code: str) -> None:
    api = Api()
    api.gate.clear()
    async with scene.running(api):
        await until(lambda: len(api.calls) == 4)
        if status == "cancelled":
            scene.store.cancel(BATCH)
            assert scene.batch().status == "cancelling"
        else:
            scene.now_s += WINDOW_S
        await asyncio.sleep(0.2)  # the runner looks every 10 ms
        api.gate.set()
        batch = await scene.ended(status)
    assert (batch.completed, batch.failed) == (4, 1)
    (line,) = scene.lines(batch.error_file_id).values()
    assert line["response"] is None and line["error"]["code"] == code
    assert getattr(batch, f"{status}_at") == int(scene.now_s)


async def test_an_invalid_file_fails_with_its_lines(scene: Scene) -> None:
    scene.add_file(b'{"custom_id": "a"}\n')
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("failed")
    assert api.calls == [] and batch.shown()["errors"]["data"][0]["line"] == 1


async def test_a_deleted_file_ends_no_batch(scene: Scene) -> None:
    used = scene.store.used_bytes()
    scene.store.delete_file(FILE)
    assert scene.store.file(FILE, "alice") is None and 0 < scene.store.used_bytes() <= used
    async with scene.running(Api()):
        assert (await scene.ended("completed")).completed == 5
    scene.store.expire(2000)
    assert not scene.store.lines(BATCH, "input").exists()


async def test_a_bug_ends_its_batch(scene: Scene) -> None:
    def broken(body: dict[str, Any]) -> LocalAnswer:
        raise RuntimeError("a bug")

    async with scene.running(Api(broken)):
        batch = await scene.ended("failed")
    assert [problem.code for problem in batch.errors] == ["internal_error"]


@pytest.mark.parametrize("seconds", [0, WINDOW_S])
async def test_a_cancelled_batch_is_validated(scene: Scene, seconds: int) -> None:
    scene.store.cancel(BATCH)
    scene.now_s += seconds
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("cancelled")
    assert (batch.total, batch.failed, api.calls) == (5, 5, [])


async def test_a_late_write_ends_before_the_lock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would overwrite what the next router stores."""
    writing, may_write = threading.Event(), threading.Event()
    save = scene.store.save

    def slow(record: BatchRecord) -> None:
        writing.set()
        may_write.wait(20)
        save(record)

    async with scene.running(Api()):
        monkeypatch.setattr(scene.store, "save", slow)
        await until(writing.is_set)
        asyncio.get_running_loop().call_later(0.05, may_write.set)
    lock = scene.store.lock(BATCH)
    assert lock is not None and may_write.is_set()
    lock.close()


async def test_a_few_batches_run_at_once(tmp_path: Path) -> None:
    scene = Scene(BatchStore(tmp_path, 1 << 20), size=1)
    for number in range(40):
        scene.store.add_batch(replace(scene.batch(), id=f"batch_{100 + number:032x}"))
    api = Api()
    async with scene.running(api) as runner:
        most = 0
        while len(api.calls) < 41:
            most = max(most, runner.num_running)
            await asyncio.sleep(0.005)
        assert most <= 16


def test_tenants_share_the_running_batches(scene: Scene) -> None:
    batches = [replace(scene.batch(), id=f"batch_{n:032x}", created_at=n, owner=Owner("b" if n > 7 else "a")) for n in range(10)]
    assert [batch.created_at for batch in next_batches(batches, [], 4)] == [0, 8, 1, 9]
    assert [batch.created_at for batch in next_batches(batches, ["b", "b"], 3)] == [0, 1, 2]
    assert next_batches(batches, [], 0) == []


def test_leftovers_of_crashes_are_deleted(scene: Scene, tmp_path: Path) -> None:
    names = (f"files/file-{9:032x}.data", "files/x.json.1.new", "batches/y.json.2.new")
    left = [tmp_path / name for name in names]
    for path in left:
        path.write_bytes(b"x")
    scene.store.expire(1000)
    assert all(path.exists() for path in left), "an upload may be in progress"
    for path in left:
        os.utime(path, (0, 0))
    scene.store.expire(1000)
    assert not any(path.exists() for path in left) and scene.store.file(FILE, "alice") is not None


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_lost_runner_does_not_lose_files(scene: Scene, is_moved: bool) -> None:
    """It is lost between the stored ids and the end."""
    file_id = f"file-{7:032x}"
    record = BatchRecord(
        id=BATCH,
        owner=ALICE,
        endpoint=CHAT,
        input_file_id=FILE,
        metadata={},
        created_at=1000,
        expires_at=1000 + WINDOW_S,
        status="finalizing",
        finalizing_at=1100,
        completed=1,
        total=1,
        output_file_id=file_id,
    )
    scene.store.save(record)
    place = scene.store.content(file_id) if is_moved else scene.store.lines(BATCH, "output")
    place.write_text('{"custom_id": "line-0"}\n')
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("completed")
    assert api.calls == [] and set(scene.lines(batch.output_file_id)) == {"line-0"}
    assert scene.store.file(file_id, "alice") is not None


def test_an_unusable_folder_names_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        check_batches(BatchSettings(tmp_path / "file", 1))
    assert "argument --batches-dir: " in capsys.readouterr().err
    check_batches(None)


def test_files_are_bounded_and_expire(scene: Scene, tmp_path: Path) -> None:
    small = BatchStore(tmp_path / "small", 10)
    record = scene.store.file(FILE, "alice")
    assert record is not None
    small.add_file(replace(record, bytes=10), io.BytesIO(b"0123456789"))
    with pytest.raises(StoreFull, match="at most 10 bytes"):
        small.add_file(replace(record, id=f"file-{3:032x}", bytes=1), io.BytesIO(b"x"))
    assert len(small.files("alice")) == 1
    small.expire(1000 + LIFETIME_S - 1)
    assert small.used_bytes() == 10
    small.expire(1000 + LIFETIME_S)
    assert small.used_bytes() == 0 and small.files("alice") == []


def test_files_of_other_tenants_are_not_found(scene: Scene) -> None:
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
