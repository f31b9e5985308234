"""The rank processes of one pod in one incarnation: they start and end together.

A rank reads its RankSpec from the first line of stdin and writes RankReady and heartbeats as lines to stdout. stdin stays open,
so that a rank exits whenever this process ends. A rank's stderr is logged; its last line becomes the reason when the rank exits.
A rank that `hang_detection` reports as hung counts as failed.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from phalanx_frontend.health import RankHealth
from phalanx_runtime.rank_spec import EXIT_DRAFT, EXIT_PEER_LOST, Beat, RankReady, RankSays, RankSpec
from phalanx_runtime.server.supervision import hang_detection
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, HeartbeatState, SilenceBounds

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "phalanx_runtime.rank")
ECHO_WAIT_S = 0.2
"""Seconds a failure waits for a better reason: a rank that lost its peer may exit before the peer's exit is detected."""
LEAVE_S = 1.0
"""Seconds ranks have to exit after stdin is closed, before they are killed."""
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 4096
_decode = msgspec.json.Decoder(RankSays).decode


class RanksEnded(Exception):
    """Ranks exited, which ends the incarnation. `is_echo`: each only lost a peer; `is_draft`: a draft failure caused it."""

    def __init__(self, why: str, is_echo: bool = False, is_draft: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.is_echo = is_echo
        self.is_draft = is_draft


class RankProcess:
    """One rank process. `ready` completes when it has loaded, `ended` when it has exited and its output is read."""

    def __init__(self, spec: RankSpec, process: asyncio.subprocess.Process) -> None:
        self.rank = spec.rank
        self.heartbeat = HeartbeatState()
        self._process = process
        self.ready: asyncio.Future[RankReady] = asyncio.get_running_loop().create_future()
        self._last_line = ""
        self._pipes = asyncio.gather(self._read_stdout(), self._read_stderr())
        self.ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, spec: RankSpec, command: Sequence[str]) -> "RankProcess":
        """Starts a rank and writes its spec to stdin. Raises OSError when the program cannot be started."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C in a terminal reaches the supervisor only, which then ends the ranks.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        return cls(spec, process)

    def why_ended(self) -> str:
        """The exit status in words, with the rank's last stderr line."""
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"rank {self.rank} {how}" + (f": {self._last_line}" if self._last_line else "")

    @property
    def has_lost_peer(self) -> bool:
        """Whether the rank exited because a peer rank had."""
        return self._process.returncode == EXIT_PEER_LOST

    @property
    def has_lost_draft(self) -> bool:
        """Whether a draft failure made the rank exit."""
        return self._process.returncode == EXIT_DRAFT

    def health(self) -> RankHealth:
        """Whether the process runs, and the seconds since its last heartbeat."""
        silent_s = None if self.heartbeat.beat is None else round(self.heartbeat.silent_s, 1)
        return RankHealth(self.rank, not self.ended.done(), silent_s)

    def close_stdin(self) -> None:
        """Closes stdin, on which the rank exits."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.close()

    def kill(self) -> None:
        """Kills the process group if it still runs: a child process would keep the pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait(self) -> None:
        await self._process.wait()
        await self._pipes

    async def _read_stdout(self) -> None:
        """Reads the ready line and the heartbeats; logs and drops any other line, so that the pipe never fills."""
        assert self._process.stdout is not None, "stdout is a pipe"
        async for line in read_lines(self._process.stdout):
            try:
                said = _decode(line)
            except msgspec.DecodeError:
                log.warning("unexpected output of rank %d: %s", self.rank, line)
                continue
            match said:
                case Beat():
                    self.heartbeat = self.heartbeat.after_beat(said)
                case RankReady():
                    if not self.ready.done():
                        self.ready.set_result(said)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "stderr is a pipe"
        async for line in read_lines(self._process.stderr):
            self._last_line = line
            log.info("rank %d: %s", self.rank, line)


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Non-empty lines, each cut to `_MAX_LINE_BYTES`."""
    rest = b""
    while chunk := await reader.read(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line[:_MAX_LINE_BYTES].decode("utf-8", "replace").strip()
        rest = rest[:_MAX_LINE_BYTES]
    if rest.strip():
        yield rest.decode("utf-8", "replace").strip()


class Ranks:
    """The ranks of this pod in one incarnation."""

    def __init__(self, processes: list[RankProcess], bounds: SilenceBounds = DEFAULT_BOUNDS) -> None:
        self._processes = processes
        self._bounds = bounds

    @classmethod
    async def start(
        cls, specs: list[RankSpec], command: Sequence[str] = RANK_COMMAND, bounds: SilenceBounds = DEFAULT_BOUNDS
    ) -> "Ranks":
        """Starts all ranks of the pod. If one cannot be started, kills the earlier ones. Raises OSError."""
        ranks = cls([], bounds)
        try:
            for spec in specs:
                ranks._processes.append(await RankProcess.start(spec, command))
        except BaseException:
            await ranks.kill()
            raise
        return ranks

    async def ready(self) -> list[RankReady]:
        """Ready messages of all ranks in order. Raises RanksEnded when a rank exits first."""
        ended = asyncio.create_task(self.failure())
        try:
            said = []
            for process in self._processes:
                both: list[asyncio.Future[Any]] = [process.ready, ended]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise ended.result()
                said.append(process.ready.result())
            return said
        finally:
            ended.cancel()

    async def failure(self) -> RanksEnded:
        """Waits until a rank exits or is hung. A draft failure precedes any other reason, and that precedes a lost peer."""
        ends = [process.ended for process in self._processes]
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait([*ends, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not any(end.done() for end in ends):
                return RanksEnded(watch.result())
        finally:
            watch.cancel()
        if all(process.has_lost_peer for process in self._processes if process.ended.done()):
            await asyncio.wait(ends, timeout=ECHO_WAIT_S)
        gone = [process for process in self._processes if process.ended.done()]
        own = [process for process in gone if not process.has_lost_peer]
        # A draft failure has priority: the next start omits the draft only if this reason is reported.
        told = next((process for process in own if process.has_lost_draft), (own or gone)[0])
        return RanksEnded(told.why_ended(), is_echo=not own, is_draft=told.has_lost_draft)

    def lost_draft(self) -> RanksEnded | None:
        """The draft failure that a rank has already exited with, if any."""
        lost = next((process for process in self._processes if process.ended.done() and process.has_lost_draft), None)
        return None if lost is None else RanksEnded(lost.why_ended(), is_draft=True)

    async def _watch(self) -> str:
        """Reason of the first rank that is hung."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(hang_detection.TURN_S)
            now = loop.time()
            for process in self._processes:
                process.heartbeat = process.heartbeat.after_turn(now - last)
            if now - last > hang_detection.MAX_TURN_S:
                await asyncio.sleep(hang_detection.SETTLE_S)
            last = now
            if why := hang_detection.first_hung([(process.rank, process.heartbeat) for process in self._processes], self._bounds):
                return why

    async def leave(self) -> None:
        """Closes the ranks' stdin; kills those that do not exit within `LEAVE_S`."""
        for process in self._processes:
            process.close_stdin()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes], timeout=LEAVE_S)
        await self.kill()

    def health(self) -> list[RankHealth]:
        """Health of each rank."""
        return [process.health() for process in self._processes]

    def end(self) -> None:
        """Kills all ranks without waiting for their exit."""
        for process in self._processes:
            process.kill()

    async def kill(self) -> None:
        """Kills all ranks and waits for their exit."""
        self.end()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes])
