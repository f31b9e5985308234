"""The rank processes of one pod in one incarnation: started together, ended together.

A rank reads its RankSpec from the first line of stdin and says RankReady and its heart's Beats in lines on stdout; stdin stays
open, so that a rank leaves when this process is gone, however it went. Everything a rank says on stderr is logged; its last
line is the reason when the rank ends. A rank that `pulse` calls hung has failed.
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
from phalanx_runtime.server.supervision import hang_detection as pulse
from phalanx_runtime.server.supervision.hang_detection import DEFAULT_BOUNDS, Bounds, Pulse

log = logging.getLogger(__name__)

RANK_COMMAND = (sys.executable, "-m", "phalanx_runtime.rank")
ECHO_WAIT_S = 0.2
"""How long a failure waits for a better reason: a rank that lost its peer may end before the peer is seen to."""
LEAVE_S = 1.0
"""How long ranks have to leave by themselves once stdin is closed, before they are killed."""
_CHUNK_BYTES = 1 << 16
_MAX_LINE_BYTES = 4096
_decode = msgspec.json.Decoder(RankSays).decode


class RanksEnded(Exception):
    """Ranks ended, and with them the incarnation. `is_echo`: none for a reason of its own; `is_draft`: what drafts failed."""

    def __init__(self, why: str, is_echo: bool = False, is_draft: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.is_echo = is_echo
        self.is_draft = is_draft


class RankProcess:
    """One rank. `ready` is done when it has loaded, `ended` when it is gone and all it said was read; `pulse` has its beats."""

    def __init__(self, spec: RankSpec, process: asyncio.subprocess.Process) -> None:
        self.rank = spec.rank
        self.pulse = Pulse()
        self._process = process
        self.ready: asyncio.Future[RankReady] = asyncio.get_running_loop().create_future()
        self._last_line = ""
        self._pipes = asyncio.gather(self._read_stdout(), self._read_stderr())
        self.ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, spec: RankSpec, command: Sequence[str]) -> "RankProcess":
        """A rank that was told its spec. Raises OSError when the program cannot be started."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C in a terminal is for us, and we end the ranks.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        return cls(spec, process)

    def why_ended(self) -> str:
        """The exit status in words, with the last line that the rank said."""
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"rank {self.rank} {how}" + (f": {self._last_line}" if self._last_line else "")

    @property
    def has_lost_peer(self) -> bool:
        """Whether the rank ended because another one had."""
        return self._process.returncode == EXIT_PEER_LOST

    @property
    def has_lost_draft(self) -> bool:
        """Whether the rank ended because what drafts failed."""
        return self._process.returncode == EXIT_DRAFT

    def health(self) -> RankHealth:
        """Whether the process lives, and how long its heart has been silent."""
        silent_s = None if self.pulse.beat is None else round(self.pulse.silent_s, 1)
        return RankHealth(self.rank, not self.ended.done(), silent_s)

    def ask_to_leave(self) -> None:
        """Closes stdin."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.close()

    def kill(self) -> None:
        """Kills the process, and whatever it started, if it still runs: a child would hold its pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait(self) -> None:
        await self._process.wait()
        await self._pipes

    async def _read_stdout(self) -> None:
        """Takes the ready line and the beats; other output has no meaning but must not fill the pipe."""
        assert self._process.stdout is not None, "stdout is a pipe"
        async for line in read_lines(self._process.stdout):
            try:
                said = _decode(line)
            except msgspec.DecodeError:
                log.warning("unexpected output of rank %d: %s", self.rank, line)
                continue
            match said:
                case Beat():
                    self.pulse = self.pulse.heard(said)
                case RankReady():
                    if not self.ready.done():
                        self.ready.set_result(said)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None, "stderr is a pipe"
        async for line in read_lines(self._process.stderr):
            self._last_line = line
            log.info("rank %d: %s", self.rank, line)


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines that are not empty, as they come, each cut to a length that a log can take."""
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
    """The ranks of this pod in one incarnation. `bounds` say when one counts as hung."""

    def __init__(self, processes: list[RankProcess], bounds: Bounds = DEFAULT_BOUNDS) -> None:
        self._processes = processes
        self._bounds = bounds

    @classmethod
    async def start(
        cls, specs: list[RankSpec], command: Sequence[str] = RANK_COMMAND, bounds: Bounds = DEFAULT_BOUNDS
    ) -> "Ranks":
        """All ranks of the pod, told their specs. When one cannot be started, those before it are killed. Raises OSError."""
        ranks = cls([], bounds)
        try:
            for spec in specs:
                ranks._processes.append(await RankProcess.start(spec, command))
        except BaseException:
            await ranks.kill()
            raise
        return ranks

    async def ready(self) -> list[RankReady]:
        """What the ranks said, in their order. Raises RanksEnded when one ends before."""
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
        """Why the ranks failed, once one ended or is hung: the reason of what drafts, or of one that did not just lose a peer."""
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
        # What drafts goes before what failed beside it: the next start leaves it out only if it is told.
        told = next((process for process in own if process.has_lost_draft), (own or gone)[0])
        return RanksEnded(told.why_ended(), is_echo=not own, is_draft=told.has_lost_draft)

    def lost_draft(self) -> RanksEnded | None:
        """Why nothing can draft, if a rank ended for that already."""
        lost = next((process for process in self._processes if process.ended.done() and process.has_lost_draft), None)
        return None if lost is None else RanksEnded(lost.why_ended(), is_draft=True)

    async def _watch(self) -> str:
        """Which rank is hung, and why, once one is."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(pulse.TURN_S)
            now = loop.time()
            for process in self._processes:
                process.pulse = process.pulse.passed(now - last)
            if now - last > pulse.MAX_TURN_S:
                await asyncio.sleep(pulse.SETTLE_S)
            last = now
            if why := pulse.first_hung([(process.rank, process.pulse) for process in self._processes], self._bounds):
                return why

    async def leave(self) -> None:
        """Asks the ranks to leave; kills those that do not within `LEAVE_S`."""
        for process in self._processes:
            process.ask_to_leave()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes], timeout=LEAVE_S)
        await self.kill()

    def health(self) -> list[RankHealth]:
        """Each rank: whether its process lives, and how long its heart has been silent."""
        return [process.health() for process in self._processes]

    def end(self) -> None:
        """Kills all ranks, and waits for none: the kernel may take its time."""
        for process in self._processes:
            process.kill()

    async def kill(self) -> None:
        """Kills all ranks and waits until they are gone."""
        self.end()
        if self._processes:
            await asyncio.wait([process.ended for process in self._processes])
