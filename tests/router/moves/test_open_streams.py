"""Open streams as `kubectl phalanx watch` reads them: over HTTP, and by the router's command."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.summary import MAX_LISTED_STREAMS, BalancePolicy, StreamList
from phalanx_router.__main__ import main
from phalanx_router.operator_endpoint import MOVES_PATH, STREAMS_PATH
from tests.polling import until
from tests.router.fakes import TOKEN, FakeLeader, Script, make_request, read_stream
from tests.router.moves.held_streams import STREAMS, streams_at_a
from tests.router.moves.moving_leaders import MoveScript
from tests.router.polled_routers import PolledRouter, polled_router


async def post(router: PolledRouter, path: str, token: str = TOKEN, **body: object) -> httpx.Response:
    return await router.http.post(path, json=body, headers={"authorization": f"Bearer {token}"})


async def listed(router: PolledRouter) -> StreamList:
    return msgspec.json.decode((await post(router, STREAMS_PATH)).content, type=StreamList)


async def test_list_has_groups_tokens_and_no_text() -> None:
    async with streams_at_a() as router:
        await until(lambda: all(len(session.stream.journal.delivered) == 5 for session in router.fleet.sessions))
        found = await listed(router)
        assert found.total == STREAMS and [stream.group for stream in found.streams] == ["a"] * STREAMS
        assert {(stream.prompt_tokens, stream.tokens, stream.moves, stream.joined) for stream in found.streams} == {
            (3, 5, 0, False)
        }
        ages_s = [stream.age_s for stream in found.streams]
        assert ages_s == sorted(ages_s, reverse=True) and ages_s[-1] >= 0, "the oldest first"
        assert (await post(router, STREAMS_PATH, "sk-1")).status_code == 401
        ids = [session.stream.journal.id for session in router.fleet.sessions]
        text = (await post(router, STREAMS_PATH)).text
        assert not any(id in text for id in ids), "an id permits to resume the stream"


async def test_moving_and_moved_streams_are_first() -> None:
    async with streams_at_a(b=MoveScript(ignored=(wire.Prepare,))) as router:
        newest = max(session.number for session in router.fleet.sessions)
        await post(router, MOVES_PATH, group="a", target="c")
        await until(lambda: any(session.moves.num_completed for session in router.fleet.sessions))
        await post(router, MOVES_PATH, group="a", target="b")
        moving, moved, other = (await listed(router)).streams
        assert (moving.group, moving.moving_to, moving.left, moving.moves) == ("a", "b", "", 0)
        assert (moved.group, moved.moving_to, moved.left, moved.moves) == ("c", "", "a", 1)
        assert (other.number, other.group, other.left) == (newest, "a", "")


async def test_list_is_bounded() -> None:
    count = MAX_LISTED_STREAMS + 3
    async with streams_at_a(count) as router:
        found = await listed(router)
        assert found.total == count and len(found.streams) == MAX_LISTED_STREAMS


async def test_joined_streams_are_listed() -> None:
    leader = FakeLeader("a", Script(hold_at=5))
    async with polled_router(leader) as router:
        await router.poll(policy=BalancePolicy(coalesce_requests=True))
        asking = [asyncio.create_task(read_stream(router.fleet, make_request(max_tokens=9))) for _ in range(2)]
        await until(lambda: len(router.fleet.sessions) == 2 and any(not s.is_computing for s in router.fleet.sessions))
        first, second = (await listed(router)).streams
        assert (first.joined, second.joined) == (False, True) and first.group == second.group == "a"
        leader.release()
        await asyncio.gather(*asking)
        assert (await listed(router)).streams == []


@pytest.mark.parametrize("leaves", ["stdin", "stdout"])
async def test_command_repeats_until_its_reader_leaves(leaves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `kubectl exec` stays open after its client."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with streams_at_a() as router:
        command = ["streams", "--port", str(router.http.base_url.port), "--token-file", str(file)]
        assert await asyncio.to_thread(main, command) == 0
        assert msgspec.json.decode(capsys.readouterr().out, type=StreamList).total == STREAMS
        program = [sys.executable, "-m", "phalanx_router", *command, "--every", "0.1"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
        assert process.stdout is not None and process.stderr is not None
        lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
        times = [msgspec.json.decode(line, type=StreamList).at_s for line in lines]
        assert times[0] < times[1]
        getattr(process, leaves).close()
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert process.stderr.read() == ""
        for name in ("stdin", "stdout", "stderr"):
            getattr(process, name).close()


@pytest.mark.parametrize("every", ["0", "x", "inf"])
def test_wrong_interval_is_refused(every: str) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["streams", "--every", every])
    assert exited.value.code == 2
