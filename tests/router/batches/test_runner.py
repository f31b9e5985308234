"""Batches run to their end: whatever router runs them, each request is answered once."""

import asyncio
import threading
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx_frontend.auth.api_keys import Quota
from phalanx_router.batches.batch_run import LOWEST_PRIORITY
from phalanx_router.batches.local_call import LocalAnswer
from phalanx_router.batches.records import WINDOW_S, BatchRecord, Owner
from phalanx_router.batches.runner import MAX_RUNNING, next_batch
from phalanx_router.batches.store import BatchStore
from phalanx_router.program import check_batches
from phalanx_router.settings import BatchSettings
from tests.polling import until
from tests.router.batches.scene import ALICE, BATCH, CHAT, FILE, Api, BatchScene


async def test_each_request_is_answered_at_the_lowest_priority(scene: BatchScene) -> None:
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("completed")
    assert scene.kept_quotas == {"alice": Quota(concurrent=3)}, "without keys after a restart, alice has the stored one"
    assert (batch.total, batch.completed, batch.failed, batch.error_file_id) == (5, 5, 0, None)
    answers = scene.lines(batch.output_file_id)
    assert {id: line["response"]["body"] for id, line in answers.items()} == {f"line-{n}": {"number": n} for n in range(5)}
    for _, caller in api.calls:
        assert caller.tenant("other", None) == "alice" and caller.priority(None) == LOWEST_PRIORITY
        assert caller.may_use("tiny") and not caller.may_use("other")


async def test_failed_requests_are_in_a_file_of_their_own(scene: BatchScene) -> None:
    def answer(body: dict[str, Any]) -> LocalAnswer:
        return LocalAnswer(400 if body["number"] % 2 else 200, {}, b'{"error": {"message": "no"}}')

    async with scene.running(Api(answer)):
        batch = await scene.ended("completed")
    assert (batch.completed, batch.failed) == (3, 2)
    errors = scene.lines(batch.error_file_id)
    assert set(errors) == {"line-1", "line-3"} and errors["line-1"]["response"]["status_code"] == 400
    file = scene.store.file(batch.error_file_id or "", "alice")
    assert file is not None and (file.purpose, file.filename) == ("batch_output", f"{BATCH}_errors.jsonl")


async def test_another_router_continues_after_a_loss(scene: BatchScene) -> None:
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


async def test_a_batch_has_one_runner(scene: BatchScene) -> None:
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


async def test_a_leaving_router_aborts_its_requests(scene: BatchScene) -> None:
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


async def test_a_runner_survives_a_lost_folder(scene: BatchScene, tmp_path: Path) -> None:
    tmp_path.rename(tmp_path.parent / "moved")
    async with scene.running(Api()):
        await asyncio.sleep(0.05)
        (tmp_path.parent / "moved").rename(tmp_path)
        assert (await scene.ended("completed")).completed == 5


async def test_busy_groups_are_asked_again(scene: BatchScene) -> None:
    seen = dict[int, int]()

    def answer(body: dict[str, Any]) -> LocalAnswer:
        seen[body["number"]] = seen.get(body["number"], 0) + 1
        return LocalAnswer(200 if seen[body["number"]] > 2 else 503, {}, b"{}")

    async with scene.running(Api(answer)):
        batch = await scene.ended("completed")
    assert batch.completed == 5 and set(seen.values()) == {3}


@pytest.mark.parametrize(("status", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
async def test_the_rest_of_an_ended_batch_fails(scene: BatchScene, status: str, code: str) -> None:
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


async def test_a_batch_with_all_answers_has_not_expired(scene: BatchScene) -> None:
    """Also if the last ones come after its window."""

    def answer(body: dict[str, Any]) -> LocalAnswer:
        if body["number"] == 4:
            scene.now_s += WINDOW_S
        return LocalAnswer(200, {}, b"{}")

    async with scene.running(Api(answer)):
        batch = await scene.ended("completed")
    assert (batch.completed, batch.expired_at) == (5, None) and (batch.completed_at or 0) >= batch.expires_at


async def test_ended_batches_are_read_once(scene: BatchScene, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene.running(Api()):
        await scene.ended("completed")
    looks, reads = list[int](), list[str]()
    unknown, stored = scene.store.unknown, scene.store.stored

    def counted_unknown(known: Container[str]) -> list[BatchRecord]:
        looks.append(1)
        return unknown(known)

    def counted_stored(id: str) -> BatchRecord | None:
        reads.append(id)
        return stored(id)

    monkeypatch.setattr(scene.store, "unknown", counted_unknown)
    monkeypatch.setattr(scene.store, "stored", counted_stored)
    async with scene.running(Api()):
        await until(lambda: len(looks) > 2)
    assert reads == [BATCH]


async def test_an_invalid_file_fails_with_its_lines(scene: BatchScene) -> None:
    scene.add_file(b'{"custom_id": "a"}\n')
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("failed")
    assert api.calls == [] and batch.shown()["errors"]["data"][0]["line"] == 1


async def test_a_bug_ends_its_request_alone(scene: BatchScene) -> None:
    def broken(body: dict[str, Any]) -> LocalAnswer:
        if body["number"] == 1:
            raise RuntimeError("a bug")
        return LocalAnswer(200, {}, b"{}")

    async with scene.running(Api(broken)):
        batch = await scene.ended("completed")
    assert (batch.completed, batch.failed) == (4, 1)
    (line,) = scene.lines(batch.error_file_id).values()
    assert (line["custom_id"], line["error"]["code"]) == ("line-1", "internal_error")


async def test_a_bug_keeps_the_answers_so_far(scene: BatchScene, monkeypatch: pytest.MonkeyPatch) -> None:
    bugs = [RuntimeError("a bug")]
    save = scene.store.save

    def broken(record: BatchRecord) -> None:
        if record.completed and bugs:
            raise bugs.pop()
        save(record)

    monkeypatch.setattr(scene.store, "save", broken)
    async with scene.running(Api()):
        batch = await scene.ended("failed")
    assert [problem.code for problem in batch.errors] == ["internal_error"]
    answers = scene.lines(batch.output_file_id)
    assert 1 <= len(answers) <= 5


@pytest.mark.parametrize("seconds", [0, WINDOW_S])
async def test_a_batch_that_ends_first_has_no_lines(scene: BatchScene, seconds: int) -> None:
    scene.store.cancel(BATCH)
    scene.now_s += seconds
    api = Api()
    async with scene.running(api):
        batch = await scene.ended("cancelled")
    assert (batch.total, batch.failed, api.calls, batch.error_file_id) == (0, 0, [], None)


async def test_a_late_write_ends_before_the_lock(scene: BatchScene, monkeypatch: pytest.MonkeyPatch) -> None:
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
    scene = BatchScene(BatchStore(tmp_path, 1 << 20), size=1)
    for number in range(40):
        scene.store.add_batch(replace(scene.batch(), id=f"batch_{100 + number:032x}"))
    api = Api()
    async with scene.running(api) as runner:
        most = 0
        while len(api.calls) < 41:
            most = max(most, runner.num_running)
            await asyncio.sleep(0.005)
        assert most <= 16


def test_tenants_share_the_running_batches(scene: BatchScene) -> None:
    batches = [replace(scene.batch(), id=f"batch_{n:032x}", created_at=n, owner=Owner("b" if n > 7 else "a")) for n in range(10)]

    def chosen(running: list[str], count: int) -> list[int]:
        waiting, tenants, times = list(batches), list(running), list[int]()
        for _ in range(count):
            batch = next_batch(waiting, tenants)
            waiting.remove(batch)
            tenants.append(batch.owner.tenant)
            times.append(batch.created_at)
        return times

    assert chosen([], 4) == [0, 8, 1, 9]
    assert chosen(["b", "b"], 3) == [0, 1, 2]


async def test_a_second_router_runs_other_batches(tmp_path: Path) -> None:
    """Also if the first one runs the oldest that it may."""
    scene = BatchScene(BatchStore(tmp_path, 1 << 20), size=1)
    for number in range(3, 2 + 2 * MAX_RUNNING):
        scene.add_batch(number)
    first, second = Api(), Api()
    first.gate.clear()
    second.gate.clear()
    async with scene.running(first) as one:
        await until(lambda: one.num_running == MAX_RUNNING)
        async with scene.running(second) as other:
            await until(lambda: other.num_running == MAX_RUNNING)


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_lost_runner_does_not_lose_files(scene: BatchScene, is_moved: bool) -> None:
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


async def test_a_batch_with_lost_answers_fails(scene: BatchScene) -> None:
    """And keeps the other file."""
    ids = {"output_file_id": f"file-{7:032x}", "error_file_id": f"file-{8:032x}"}
    scene.store.save(replace(scene.batch(), status="finalizing", finalizing_at=1100, **ids))
    scene.store.lines(BATCH, "errors").write_text('{"custom_id": "line-0"}\n')
    async with scene.running(Api()):
        batch = await scene.ended("failed")
    assert [problem.code for problem in batch.errors] == ["answers_lost"]
    assert batch.output_file_id is None and set(scene.lines(batch.error_file_id)) == {"line-0"}


def test_an_unusable_folder_names_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        check_batches(BatchSettings(tmp_path / "file", 1))
    assert "argument --batches-dir: " in capsys.readouterr().err
    check_batches(None)
