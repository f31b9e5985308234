"""A disk that does not answer: clients of batches get a 503, others notice nothing, and no request starts.

Reads of a pipe without a writer block, as those of a slow disk.
"""

import asyncio
import os
import threading
from pathlib import Path

import httpx
import pytest

from phalanx_frontend.app import create_app
from phalanx_router.batches.disk import NUM_THREADS
from phalanx_router.batches.records import BatchRecord
from phalanx_router.batches.routes import batch_routes
from phalanx_router.batches.store import BatchStore
from tests.frontend.fakes import FakeBackend
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.batches.scene import BATCH, Api, BatchScene


async def test_a_silent_disk_is_a_503(tmp_path: Path) -> None:
    app = create_app(FakeBackend())
    app.include_router(batch_routes(BatchStore(tmp_path, 1 << 20, answer_s=0.1)))
    pipe = tmp_path / "files" / "pipe.json"
    os.mkfifo(pipe)
    async with http_server(app) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        answers = await asyncio.gather(*(client.get("/v1/files") for _ in range(4 * NUM_THREADS)))
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(503, "storage_silent")}
        assert answers[0].headers["retry-after"] == "30"
        assert await asyncio.wait_for(asyncio.to_thread(int), 30) == 0, "as for a long prompt"

        writer = os.open(pipe, os.O_WRONLY)
        pipe.unlink()
        os.close(writer)

        async def answers_again() -> bool:
            return (await client.get("/v1/files")).status_code == 200

        await until(answers_again)


async def test_no_request_starts_while_a_write_is_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = BatchScene(BatchStore(tmp_path, 1 << 20), size=3000, overdue_s=0.02)
    writing, may_write = threading.Event(), threading.Event()
    save = scene.store.save

    def slow(record: BatchRecord) -> None:
        if record.status == "in_progress" and record.completed:
            writing.set()
            may_write.wait(60)
        save(record)

    monkeypatch.setattr(scene.store, "save", slow)
    api = Api()
    async with scene.running(api):
        await until(writing.is_set)
        await asyncio.sleep(0.3)
        num_started = len(api.calls)
        await asyncio.sleep(0.3)
        assert len(api.calls) == num_started < 3000
        may_write.set()
        await until(lambda: len(api.calls) > num_started)


async def test_one_input_is_checked_at_a_time(scene: BatchScene) -> None:
    pipes = [scene.store.lines(BATCH, "input"), scene.add_batch(3)]
    for pipe in pipes:
        pipe.unlink()
        os.mkfifo(pipe)
    async with scene.running(Api()):
        first = await opened_pipe(pipes)
        await asyncio.sleep(0.4)
        early = open_pipe(pipes)
        for writer in (first, early):
            if writer is not None:
                os.close(writer)
        assert early is None
        os.close(await opened_pipe(pipes))


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_check_ends_with_its_batch(scene: BatchScene, is_cancelled: bool) -> None:
    """Or with its router, which another one follows."""
    pipe = scene.store.lines(BATCH, "input")
    pipe.unlink()
    os.mkfifo(pipe)
    async with scene.running(Api()) as runner:
        writer = await opened_pipe([pipe])
        os.write(writer, b"\n")
        feeding = asyncio.create_task(feed(writer))
        try:
            if is_cancelled:
                scene.store.cancel(BATCH)
                assert (await scene.ended("cancelled")).total == 0
            else:
                scene.is_leaving = True
                await until(lambda: not runner.num_running)
                assert scene.batch().status == "validating"
        finally:
            feeding.cancel()
            os.close(writer)


async def opened_pipe(pipes: list[Path]) -> int:
    """Returns the end to write to of a pipe that is read, which it takes from the list."""
    found = list[int]()

    def is_read() -> bool:
        if (writer := open_pipe(pipes)) is not None:
            found.append(writer)
        return bool(found)

    await until(is_read)
    return found[0]


def open_pipe(pipes: list[Path]) -> int | None:
    for pipe in pipes:
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        pipes.remove(pipe)
        return writer
    return None


async def feed(writer: int) -> None:
    """Writes empty lines, slowly enough that a check never ends by their number."""
    try:
        while True:
            os.write(writer, b"\n")
            await asyncio.sleep(0.01)
    except BrokenPipeError:
        pass
