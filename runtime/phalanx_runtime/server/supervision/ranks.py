"""The rank processes of one pod in one incarnation.

A rank reads its RankSpec from the first line of stdin and writes RankReady and heartbeats as lines to stdout. It exits when stdin
closes. stderr is logged; its last line becomes the reason of an exit.
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
from phalanx_runtime.rank_spec import EXIT_DEVICE, EXIT_DRAFT, EXIT_MODEL, EXIT_PEER_LOST, Beat, RankReady, RankSays, RankSpec
from phalanx_runtime.server.supervision import hang_detection
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, HeartbeatState, SilenceBounds

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "phalanx_runtime.rank")
ECHO_WAIT_S = 0.2
"""Wait for the cause: a rank may exit before the exit of its lost peer is detected."""
EXIT_S = 1.0
"""Time to exit after stdin closes."""
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 4096
_decode = msgspec.json.Decoder(RankSays).decode


class RanksEnded(Exception):
    """Ranks exited; see `incarnation.RanksFailed`. `is_model`: the model cannot be had or loaded."""

    def __init__(self, why: str, is_echo: bool = False, is_draft: bool = False, is_model: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.is_echo = is_echo
        self.is_draft = is_draft
        self.is_model = is_model


class RankProcess:
    """One rank process."""

    def __init__(self, spec: RankSpec, process: asyncio.subprocess.Process) -> None:
        self.rank = spec.rank
        self.heartbeat = HeartbeatState()
        self._process = process
        self.ready: asyncio.Future[RankReady] = asyncio.get_running_loop().create_future()
        """Completes when the rank has loaded."""
        self._last_line = ""
        self._pipes = asyncio.gather(self._read_stdout(), self._read_stderr())
        self.ended = asyncio.create_task(self._wait())
        """Completes after the exit and all output."""

    @classmethod
    async def start(cls, spec: RankSpec, command: Sequence[str]) -> "RankProcess":
        """Starts a rank. Raises OSError."""
        pipe = asyncio.subprocess.PIPE
        # In its own session: Ctrl-C reaches the supervisor only.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        return cls(spec, process)

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; absent until the exit."""
        return self._process.returncode

    def exit_reason(self) -> str:
        """Exit status and last stderr line."""
        code = self.exit_code
        status = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"rank {self.rank} {status}" + (f": {self._last_line}" if self._last_line else "")

    @property
    def has_lost_peer(self) -> bool:
        """Whether the rank exited because of a lost peer."""
        return self.exit_code == EXIT_PEER_LOST

    @property
    def has_draft_failed(self) -> bool:
        """Whether the rank exited because of a draft failure."""
        return self.exit_code == EXIT_DRAFT

    def health(self) -> RankHealth:
        """Process and heartbeat."""
        silent_s = None if self.heartbeat.beat is None else round(self.heartbeat.silent_s, 1)
        return RankHealth(self.rank, not self.ended.done(), silent_s)

    def close_stdin(self) -> None:
        """Lets the rank exit."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.close()

    def kill(self) -> None:
        """Kills the process group: children would keep the pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait(self) -> None:
        await self._process.wait()
        await self._pipes

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None, "stdout is a pipe"
        async for line in read_lines(self._process.stdout):
            try:
                frame = _decode(line)
            except msgspec.DecodeError:
                log.warning("unexpected rank output", extra={"rank": self.rank, "line": line})
                continue
            match frame:
                case Beat():
                    self.heartbeat = self.heartbeat.after_beat(frame)
                case RankReady():
                    if not self.ready.done():
                        self.ready.set_result(frame)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "stderr is a pipe"
        async for line in read_lines(self._process.stderr):
            self._last_line = line
            log.info("rank output", extra={"rank": self.rank, "line": line})


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
    """The ranks of this pod."""

    def __init__(self, processes: list[RankProcess], bounds: SilenceBounds = DEFAULT_BOUNDS) -> None:
        self._processes = processes
        self._bounds = bounds
        self._device_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def processes(self) -> Sequence[RankProcess]:
        """In rank order."""
        return tuple(self._processes)

    @classmethod
    async def start(
        cls, specs: list[RankSpec], command: Sequence[str] = RANK_COMMAND, bounds: SilenceBounds = DEFAULT_BOUNDS
    ) -> "Ranks":
        """Starts all ranks. If one cannot be started, kills the others. Raises OSError."""
        ranks = cls([], bounds)
        try:
            for spec in specs:
                ranks._processes.append(await RankProcess.start(spec, command))
        except BaseException:
            await ranks.kill()
            raise
        return ranks

    def loaded(self) -> tuple[int, int]:
        """Bytes of weights that the ranks of this pod have read, and that they will read; 0 if unknown."""
        beats = [process.heartbeat.beat or Beat() for process in self._processes if not process.ready.done()]
        return sum(beat.loaded_bytes for beat in beats), sum(beat.weight_bytes for beat in beats)

    async def ready(self) -> list[RankReady]:
        """Ready messages in rank order. Raises RanksEnded when a rank exits first."""
        ended = asyncio.create_task(self.failure())
        try:
            ready = []
            for process in self._processes:
                both: list[asyncio.Future[Any]] = [process.ready, ended]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise ended.result()
                ready.append(process.ready.result())
            return ready
        finally:
            ended.cancel()

    def fail(self, why: str) -> None:
        """Ends the incarnation: a device failed. A rank may hang instead of an exit."""
        if not self._device_failure.done():
            self._device_failure.set_result(why)

    async def failure(self) -> RanksEnded:
        """Waits until a rank exits or hangs, or `fail`. Draft failures precede other reasons, lost peers follow."""
        ends = [process.ended for process in self._processes]
        watch = asyncio.create_task(self._watch())
        try:
            both: list[asyncio.Future[Any]] = [*ends, watch, self._device_failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._device_failure.done():
                return RanksEnded(self._device_failure.result())
            if watch.done() and not any(end.done() for end in ends):
                return RanksEnded(watch.result())
        finally:
            watch.cancel()
        if all(process.has_lost_peer for process in self._processes if process.ended.done()):
            await asyncio.wait(ends, timeout=ECHO_WAIT_S)
        ended = [process for process in self._processes if process.ended.done()]
        causes = [process for process in ended if not process.has_lost_peer]
        # An unreported draft failure would repeat at the next start.
        cause = next((process for process in causes if process.has_draft_failed), (causes or ended)[0])
        why = cause.exit_reason()
        if cause.exit_code == EXIT_DEVICE:  # the driver may report why
            await asyncio.wait([self._device_failure], timeout=ECHO_WAIT_S)
            why = f"{self._device_failure.result()}; {why}" if self._device_failure.done() else why
        is_model = cause.exit_code == EXIT_MODEL
        return RanksEnded(why, is_echo=not causes, is_draft=cause.has_draft_failed, is_model=is_model)

    def draft_failure(self) -> RanksEnded | None:
        """The draft failure, if a rank exited with one."""
        failed = next((process for process in self._processes if process.ended.done() and process.has_draft_failed), None)
        return None if failed is None else RanksEnded(failed.exit_reason(), is_draft=True)

    async def _watch(self) -> str:
        """Reason of the first hung rank."""
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

    async def shut_down(self) -> None:
        """Closes stdin; kills ranks that do not exit within `EXIT_S`."""
        for process in self._processes:
            process.close_stdin()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes], timeout=EXIT_S)
        await self.kill()

    def health(self) -> list[RankHealth]:
        """Health of each rank."""
        return [process.health() for process in self._processes]

    def send_kill(self) -> None:
        """Kills all ranks without waiting."""
        for process in self._processes:
            process.kill()

    async def kill(self) -> None:
        """Kills all ranks; waits for their exit."""
        self.send_kill()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes])
