"""Routers, groups and a reference engine as processes of this machine, which can be killed, stopped and started again."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.frame.programs import descendants, end, free_port
from bench.soak.processes import Child, children, start_of, use_of
from bench.soak.record import Use
from bench.soak.workload import CONTEXT

TOKEN = "of the soak"
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""Environment of ranks. 32 kernels should fill these caches within the warm-up; 128, the default, take ten minutes and 80 MiB."""
NOTED = ".pid"
"""Of files with the process of a program and its start time."""
GROUP_NAMES = "abcdefgh"


@dataclass(slots=True)
class Member:
    """One program with its descendants, across restarts."""

    name: str
    command: list[str]
    port: int
    log: Path
    is_spared: bool = False
    """Whether it is stopped and cut off, but never killed, so that its process lives as long as the piece."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def _noted(self) -> Path:
        return self.log.with_suffix(NOTED)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} runs"
        return self.process.pid

    def start(self) -> None:
        """Starts the program and notes its process in a file, so that a resumed run ends what a killed one left."""
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **KERNELS}
            )
        self._noted.write_text(f"{self.pid} {start_of(self.pid)}")

    def kill(self, *, is_whole: bool = False) -> None:
        """Kills the program; with `is_whole` its ranks too, at the same moment."""
        for pid in [self.pid, *(descendants(self.pid) if is_whole else ())]:
            send_signal(pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def terminate(self, limit_s: float) -> int:
        """Ends the program with SIGTERM and returns its exit status. Raises TimeoutExpired."""
        assert self.process is not None, f"{self.name} runs"
        self.process.terminate()
        return self.process.wait(limit_s)

    def status(self) -> int | None:
        """Returns the exit status; `None` while the program runs."""
        return None if self.process is None else self.process.poll()

    def end(self) -> None:
        """Ends the program and all descendants."""
        if self.process is not None:
            for pid in [self.pid, *descendants(self.pid)]:
                send_signal(pid, signal.SIGCONT)
            end(self.process)
            self._noted.unlink(missing_ok=True)

    def pids(self) -> dict[str, int]:
        """Returns the running processes by name: the program, and its children, numbered in order of their start."""
        found, count = {self.name: self.pid}, Counter[str]()
        for child in children(self.pid):
            found[f"{self.name} {child.module} {count[child.module]}"] = child.pid
            count[child.module] += 1
        return found

    def ranks(self) -> list[Child]:
        """Returns the running ranks of a group."""
        return [child for child in children(self.pid) if child.module == "rank"]

    def uses(self) -> dict[str, Use]:
        """Returns what each process uses. The program's values include the size of its log."""
        found = dict[str, Use]()
        for name, pid in self.pids().items():
            values, started = use_of(pid), start_of(pid)
            if values is not None and started is not None:
                found[name] = Use(f"{pid}/{started}", dict(values))
        if self.name in found:
            found[self.name].values["log_bytes"] = float(self.log.stat().st_size)
        return found


def send_signal(pid: int, number: signal.Signals) -> None:
    """Sends a signal, unless the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass(slots=True)
class Fleet:
    """All programs."""

    reference: Member
    groups: list[Member] = field(default_factory=list)
    routers: list[Member] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [self.reference, *self.groups, *self.routers]

    def end(self) -> None:
        for member in reversed(self.members):
            member.end()


def make_fleet(folder: Path, num_groups: int, num_routers: int = 2) -> Fleet:
    """Returns a fleet that is not started. The last of several groups has two ranks; the first group and router are spared.

    Model, logs and pages on disk are in `folder`.
    """
    model = folder / "tiny"
    if not (model / "config.json").exists():
        from tests.runtime.tiny import save_tiny  # imports torch, which takes seconds

        save_tiny(model, max_position_embeddings=CONTEXT)
    token = folder / "token"
    token.write_text(TOKEN)
    reference = engine("reference", model, folder)
    reference.is_spared = True
    fleet = Fleet(reference)
    for number, name in enumerate(GROUP_NAMES[:num_groups]):
        ranks = 2 if 0 < number == num_groups - 1 else 1
        tiers = ["--kv-cache-memory-bytes", str(4_000_000 // ranks), "--host-cache-memory", str(6_000_000 // ranks)]
        tiers += ["--disk-cache-path", str(folder / f"pages-{name}"), "--disk-cache-bytes", "40000000"]
        tiers += ["--tensor-parallel-size", str(ranks), "--token-file", str(token)]
        fleet.groups.append(engine(f"group {name}", model, folder, tiers))
        fleet.groups[-1].is_spared = number == 0
    ports = [free_port() for _ in range(num_routers)]
    for number, port in enumerate(ports):
        fleet.routers.append(_router(number, ports, port, fleet.groups, folder))
    return fleet


def engine(name: str, model: Path, folder: Path, flags: Sequence[str] = ("--kv-cache-memory-bytes", "16000000")) -> Member:
    """Returns a group of this model in float64 that is not started. flags: of the command."""
    port = free_port()
    command = [sys.executable, "-m", "phalanx_runtime", "serve", str(model), "--served-model-name", "tiny"]
    command += ["--dtype", "float64", "--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", "20"]
    command += ["--max-model-len", str(CONTEXT), *flags]
    return Member(name, command, port, folder / f"{name.replace(' ', '-')}.log")


def _router(number: int, ports: Sequence[int], port: int, groups: Sequence[Member], folder: Path) -> Member:
    name = f"router {GROUP_NAMES[number]}"
    leaders = ",".join(f"127.0.0.1:{group.port}" for group in groups)
    peers = ",".join(f"127.0.0.1:{peer}" for peer in ports if peer != port)
    command = [sys.executable, "-m", "phalanx_router", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--leaders", leaders, "--token-file", str(folder / "token"), "--drain-s", "5"]
    command += ["--peers", peers] if peers else []
    return Member(name, command, port, folder / f"{name.replace(' ', '-')}.log", is_spared=number == 0)


def end_remaining(folder: Path) -> None:
    """Kills the programs that a killed run left."""
    for path in folder.glob(f"*{NOTED}"):
        words = path.read_text().split()
        if len(words) == 2 and start_of(int(words[0])) == words[1]:
            for pid in [int(words[0]), *descendants(int(words[0]))]:
                send_signal(pid, signal.SIGKILL)
        path.unlink()


def wait_until_ended(processes: Sequence[Child], limit_s: float) -> list[Child]:
    """Returns the processes that still run after the limit."""
    deadline = time.monotonic() + limit_s
    while (running := [child for child in processes if start_of(child.pid) == child.started]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running
