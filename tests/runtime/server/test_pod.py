"""Rank processes of one pod, and the launcher that runs one incarnation after another."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx_api import wire
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank_spec import RankReady, RankSpec
from phalanx_runtime.server.supervision.pod import Launch, RankLauncher, ends_program
from phalanx_runtime.server.supervision.ranks import Ranks, RanksEnded, read_lines
from tests.polling import until
from tests.runtime.fake_rank import NUM_PAGES, PAGE_SIZE, command
from tests.runtime.pods import is_alive, make_spec, mark_of

SERVED = wire.Served("a model", "a layout", 64)
READY = RankReady(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=200, served=SERVED)


@asynccontextmanager
async def running(folder: Path, count: int, *behavior: str) -> AsyncIterator[Ranks]:
    ranks = await Ranks.start([make_spec(folder, rank, count) for rank in range(count)], command(*behavior))
    try:
        yield ranks
    finally:
        await ranks.kill()
    assert not [rank for rank in range(count) if is_alive(mark_of(folder, 1, rank)["pid"])]


async def test_ranks_receive_their_specs_and_report_ready(tmp_path: Path) -> None:
    async with running(tmp_path, 2, "ready") as ranks:
        assert await ranks.ready() == [READY, READY]
        assert mark_of(tmp_path, 1, 1).items() >= {"rank": 1, "world_size": 2, "hosts": ["127.0.0.1"] * 2}.items()


@pytest.mark.parametrize(
    ("behavior", "why", "is_echo", "is_draft"),
    [
        (("exit", "4", "no such tensor"), "rank 0 ended with code 4: no such tensor", False, False),
        (("exit-if", "1", "4", "no such tensor"), "rank 1 ended with code 4: no such tensor", False, False),
        (("exit", "3", "a peer is lost"), "rank 0 ended with code 3: a peer is lost", True, False),
        (("exit-if", "1", "5", "no memory"), "rank 1 ended with code 5: no memory", False, True),
    ],
    ids=["all ranks", "own reason", "lost peer", "draft failure"],
)
async def test_failure_reason_is_the_ranks_last_line(
    tmp_path: Path, behavior: tuple[str, ...], why: str, is_echo: bool, is_draft: bool
) -> None:
    ranks = await Ranks.start([make_spec(tmp_path, rank, 2) for rank in range(2)], command(*behavior))
    with pytest.raises(RanksEnded) as caught:
        await ranks.ready()
    await ranks.kill()
    if behavior[0] == "exit":
        assert caught.value.why.replace("rank 1", "rank 0") == why
    else:
        assert caught.value.why == why
    assert (caught.value.is_echo, caught.value.is_draft) == (is_echo, is_draft)


@pytest.mark.parametrize("codes", [("1", "5", "3"), ("3", "5", "1")], ids=["after another", "before another"])
async def test_draft_failure_is_reported_before_others(tmp_path: Path, codes: tuple[str, ...]) -> None:
    async with running(tmp_path, 3, "exit-each", *codes) as ranks:
        await until(lambda: all(process.ended.done() for process in ranks.processes))
        end = await ranks.failure()
    assert (end.why, end.is_echo, end.is_draft) == ("rank 1 ended with code 5: its own reason", False, True)


async def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    async with running(tmp_path, 2, "ready") as ranks:
        await ranks.ready()
        ranks.processes[1].kill()
        end = await ranks.failure()
        assert end.why == "rank 1 was killed by signal 9: rank 1 of incarnation 1 started"


async def test_unexpected_output_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, 1, "noise"):
        await until(lambda: "unexpected rank output" in caplog.messages)
    (record,) = [record for record in caplog.records if record.message == "unexpected rank output"]
    assert (vars(record)["rank"], vars(record)["line"]) == (0, "hello")


async def test_stopped_rank_is_hung_others_are_not(tmp_path: Path) -> None:
    async with running(tmp_path, 2, "ready") as ranks:
        await ranks.ready()
        failure = asyncio.create_task(ranks.failure())
        await until(lambda: all(process.heartbeat.beat is not None for process in ranks.processes))
        os.kill(mark_of(tmp_path, 1, 1)["pid"], signal.SIGSTOP)
        end = await asyncio.wait_for(failure, 20)
        assert end.why.startswith("rank 1 is hung: silent for") and not end.is_echo


async def test_failed_start_leaves_no_rank(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-program"):
        await Ranks.start([make_spec(tmp_path)], [str(tmp_path / "no-such-program")])


async def test_ranks_exit_on_request(tmp_path: Path) -> None:
    async with running(tmp_path, 2, "ready") as ranks:
        await ranks.ready()
        await ranks.shut_down()
        assert [process.exit_code for process in ranks.processes] == [0, 0]


async def test_rank_that_does_not_exit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx_runtime.server.supervision.ranks.EXIT_S", 0.01)
    async with running(tmp_path, 1, "stubborn") as ranks:
        await ranks.ready()
        await ranks.shut_down()
        assert ranks.processes[0].exit_code == -9


@pytest.mark.parametrize(
    ("data", "lines"),
    [(b"a\n\n b \nc", ["a", "b", "c"]), (b"\xff\n", ["\ufffd"]), (b"x" * 200_000 + b"\ny\n", ["x" * 4096, "y"])],
    ids=["lines", "invalid text", "long line"],
)
async def test_lines_are_split_and_cut(data: bytes, lines: list[str]) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    assert [line async for line in read_lines(reader)] == lines


class RecordingListener:
    """Records launches; `error` is raised when ranks are ready."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ready: list[tuple[int, list[RankReady]]] = []
        self.failed: list[tuple[int, str, bool]] = []
        self._error = error

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        if self._error is not None:
            raise self._error
        self.ready.append((launch.incarnation, ready))

    def ranks_failed(self, launch: Launch, end: RanksEnded) -> None:
        self.failed.append((launch.incarnation, end.why, end.is_echo))


@asynccontextmanager
async def pod_of(
    folder: Path, listener: RecordingListener, *behavior: str, locate: Callable[[], Path] | None = None
) -> AsyncIterator[RankLauncher]:
    async def find() -> Path:
        return locate() if locate is not None else folder

    pod = RankLauncher(find, lambda launch, model: [make_spec(model, 0, 1, launch.incarnation)], listener, command(*behavior))
    task = asyncio.create_task(pod.run())
    try:
        yield pod
    finally:
        task.cancel()
        await asyncio.wait([task])


def launch(incarnation: int) -> Launch:
    return Launch(incarnation=incarnation, hosts=("127.0.0.1",), key="00")


async def test_next_incarnation_starts_after_the_previous_ended(tmp_path: Path) -> None:
    listener = RecordingListener()
    async with pod_of(tmp_path, listener, "ready") as pod:
        pod.start(launch(1))
        await until(lambda: listener.ready == [(1, [READY])])
        pod.start(launch(2))
        await until(lambda: listener.ready == [(1, [READY]), (2, [READY])])
        assert not is_alive(mark_of(tmp_path, 1, 0)["pid"])
        assert is_alive(mark_of(tmp_path, 2, 0)["pid"])
        pod.stop()
        await until(lambda: not is_alive(mark_of(tmp_path, 2, 0)["pid"]))
        pod.start(launch(3))
        await until(lambda: len(listener.ready) == 3)
    assert not is_alive(mark_of(tmp_path, 3, 0)["pid"])
    assert listener.failed == []


async def test_launcher_reports_activity_and_ranks(tmp_path: Path) -> None:
    listener = RecordingListener()
    async with pod_of(tmp_path, listener, "ready") as pod:
        assert (pod.activity, pod.ranks()) == ("idle", [])
        pod.start(launch(1))
        await until(lambda: pod.activity == "running")
        assert [(rank.rank, rank.alive) for rank in pod.ranks()] == [(0, True)]
        os.kill(mark_of(tmp_path, 1, 0)["pid"], signal.SIGKILL)
        await until(lambda: pod.activity == "idle")
        assert [(rank.rank, rank.alive) for rank in pod.ranks()] == [(0, False)]
        pod.stop()
        await until(lambda: not pod.ranks())


async def test_launcher_ends_until_a_ranks_pipes_close(tmp_path: Path) -> None:
    async with pod_of(tmp_path, RecordingListener(), "escape") as pod:
        pod.start(launch(1))
        await until(lambda: pod.activity == "running")
        pod.stop()
        await until(lambda: pod.activity == "ending" and not is_alive(mark_of(tmp_path, 1, 0)["pid"]))
        assert pod.activity_s() >= 0
        os.kill(int((tmp_path / "marks" / "escaped").read_text()), signal.SIGKILL)
        await until(lambda: pod.activity == "idle")


async def test_ranks_that_end_are_reported(tmp_path: Path) -> None:
    listener = RecordingListener()
    async with pod_of(tmp_path, listener, "die-at", "1") as pod:
        pod.start(launch(1))
        await until(lambda: bool(listener.failed))
    assert listener.failed == [(1, "rank 0 ended with code 1: out of memory", False)]


class BlockingListener(RecordingListener):
    """Never returns from `ranks_ready`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = asyncio.Event()

    async def ranks_ready(self, launch: Launch, folder: Path, ready: list[RankReady]) -> None:
        self.is_ready.set()
        await asyncio.Event().wait()


async def test_ending_pod_reports_its_draft_failure(tmp_path: Path) -> None:
    """Another pod reported its lost peer first: without this report the next start drafts again."""
    listener = BlockingListener()
    async with pod_of(tmp_path, listener, "draft-dies") as pod:
        pod.start(launch(1))
        await listener.is_ready.wait()
        await until(lambda: [rank.alive for rank in pod.ranks()] == [False])
        assert listener.failed == []
        pod.stop()
        await until(lambda: pod.activity == "idle")
    assert listener.failed == [(1, "rank 0 ended with code 5: no memory for the draft", False)]


def no_model() -> Path:
    raise ModelError("no such model")


def fail() -> Path:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("locate", "error", "why"),
    [
        (no_model, None, "no such model"),
        (None, ModelError("no tokenizer"), "no tokenizer"),
        (fail, None, "internal error: KeyError('oops')"),
    ],
    ids=["no model", "no assets", "internal error"],
)
async def test_failure_outside_the_ranks_is_reported(
    tmp_path: Path, locate: Callable[[], Path] | None, error: Exception | None, why: str
) -> None:
    listener = RecordingListener(error)
    async with pod_of(tmp_path, listener, "ready", locate=locate) as pod:
        pod.start(launch(1))
        await until(lambda: bool(listener.failed))
    assert listener.failed == [(1, why, False)]


@pytest.mark.parametrize(
    ("is_in_pod", "has_served", "is_model", "expected"),
    [
        (False, False, True, True),
        (True, False, True, False),
        (False, True, True, False),
        (False, False, False, False),
    ],
    ids=["first start", "in a pod", "has served", "another reason"],
)
def test_only_a_first_start_without_model_ends(is_in_pod: bool, has_served: bool, is_model: bool, expected: bool) -> None:
    assert ends_program(is_in_pod=is_in_pod, has_served=has_served, is_model=is_model) is expected


@pytest.mark.parametrize(
    ("locate", "behavior", "why"),
    [
        (no_model, ["ready"], "no such model"),
        (None, ["exit", "4", "no such tensor"], "rank 0 ended with code 4: no such tensor"),
    ],
    ids=["not found", "refused by a rank"],
)
async def test_launcher_outside_of_a_pod_ends(
    tmp_path: Path, locate: Callable[[], Path] | None, behavior: list[str], why: str
) -> None:
    async def find() -> Path:
        return locate() if locate is not None else tmp_path

    def specs(launch: Launch, model: Path) -> list[RankSpec]:
        return [make_spec(model, 0, 1, launch.incarnation)]

    listener = RecordingListener()
    pod = RankLauncher(find, specs, listener, command(*behavior), is_in_pod=False)
    pod.start(launch(1))
    with pytest.raises(ModelError, match=why):
        await asyncio.wait_for(pod.run(), 60)
    assert listener.failed == []


async def test_launcher_reports_the_weights_of_all_ranks(tmp_path: Path) -> None:
    async def find() -> Path:
        return tmp_path

    def specs(launch: Launch, model: Path) -> list[RankSpec]:
        return [make_spec(model, rank, 2, launch.incarnation) for rank in range(2)]

    reports: list[tuple[int, int]] = []
    listener = RecordingListener()
    pod = RankLauncher(find, specs, listener, command("loading"), weights_loaded=lambda *loaded: reports.append(loaded))
    pod.start(launch(1))
    running = asyncio.create_task(pod.run())
    await until(lambda: (60, 240) in reports)
    running.cancel()
    await asyncio.wait([running])


async def test_ready_ranks_report_no_weights(tmp_path: Path) -> None:
    async with running(tmp_path, 2, "ready") as ranks:
        await ranks.ready()
        assert ranks.loaded() == (0, 0)
