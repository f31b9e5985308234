"""Starts programs, waits until they are ready, measures their CPU and ends them."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx_frontend.tls import unverified_context

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EXIT_TIMEOUT_S = 20.0
_LOG_TAIL = 30
_PORTS = range(20_000, 30_000)
"""Below Linux's ports of outgoing connections (from 32,768) and the node ports of Kubernetes."""
_GROUPS_READY = re.compile(r"^phalanx_router_groups_ready [1-9]", re.MULTILINE)
_given = set[int]()
"""Ports that this process returned."""


@dataclass(frozen=True, slots=True)
class Program:
    """A running program that serves HTTP."""

    name: str
    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)


def own_ports(environment: Mapping[str, str]) -> range:
    """Returns the ports that `free_port` chooses from. Each worker of pytest-xdist and its programs have ports of their own.

    Otherwise two workers could choose one port before the program of either binds it.
    """
    worker, workers = environment.get("PYTEST_XDIST_WORKER", "gw0"), environment.get("PYTEST_XDIST_WORKER_COUNT", "1")
    return _PORTS[int(worker.removeprefix("gw")) :: int(workers)]


def free_port() -> int:
    """Returns a port that no program listens on, another one at each call.

    It is below those of outgoing connections, one of which could take a port of theirs before the program binds it.
    """
    ports = [port for port in own_ports(os.environ) if port not in _given]
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise RuntimeError(f"every port of {_PORTS} is in use")


@contextmanager
def running(
    name: str, module: str, arguments: list[str], folder: Path, ready_s: float = 300.0, before: Sequence[str] = ()
) -> Iterator[Program]:
    """Runs `python -m module arguments --host --port` until the block ends; yields once `/readyz` returns 200.

    `before`: a command prefix that replaces itself by the program, such as `nice -n 10`.

    Raises RuntimeError with the end of the log if the program exits or is not ready within `ready_s`.
    """
    port = free_port()
    command = [*before, sys.executable, "-m", module, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with serving(name, command, port, "/readyz", folder, ready_s) as program:
        yield program


@contextmanager
def serving(
    name: str,
    command: list[str],
    port: int,
    ready_path: str,
    folder: Path,
    ready_s: float,
    env: Mapping[str, str] | None = None,
    scheme: str = "http",
) -> Iterator[Program]:
    """Runs an HTTP server on `port` until the block ends; yields once `ready_path` returns 200. Its descendants end with it.

    A router is ready before its first group has reported its model; this waits for a group too.

    Raises RuntimeError with the end of the log if the program exits or is not ready within `ready_s`.
    """
    log, full_env = folder / f"{name}.log", {**os.environ, **(env or {})}
    with ExitStack() as stack:
        with _sigterm_deferred(), open(log, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=full_env)
            stack.callback(end, process)
        program = Program(name, f"{scheme}://127.0.0.1:{port}", process, log)
        _wait_ready(program, ready_path, ready_s)
        if "phalanx_router" in command:
            _wait_ready(program, "/metrics", ready_s, lambda text: _GROUPS_READY.search(text) is not None)
        yield program


@contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """Defers SIGTERM until the block ends, so that a program that starts here is always ended."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    received = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            signal.raise_signal(signal.SIGTERM)


def _wait_ready(program: Program, path: str, ready_s: float, accepts: Callable[[str], bool] = lambda _: True) -> None:
    """Waits until `path` returns 200 and a body that `accepts` is true of."""
    deadline, unverified = time.monotonic() + ready_s, unverified_context()
    while time.monotonic() < deadline:
        if program.process.poll() is not None:
            raise RuntimeError(f"{program.name} exited with {program.process.returncode}:\n{_tail(program.log)}")
        try:
            with urllib.request.urlopen(program.base_url + path, timeout=5, context=unverified) as answer:
                if accepts(answer.read().decode()):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{program.name} was not ready after {ready_s:.0f} s:\n{_tail(program.log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Terminates a program (SIGKILL after 20 s), kills its remaining descendants and waits until they have exited."""
    children = {child: _start_ticks(child) for child in descendants(process.pid)}
    process.terminate()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        children |= {child: _start_ticks(child) for child in descendants(process.pid)}
        process.kill()
        process.wait()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while (
        remaining := [child for child, started in children.items() if _is_alive(child, started)]
    ) and time.monotonic() < deadline:
        for child in remaining:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _start_ticks(pid: int) -> str:
    """Returns the start time of a process in ticks; it distinguishes processes that reuse a pid."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return fields[19] if fields else ""


def _is_alive(pid: int, started: str) -> bool:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[0] != "Z" and fields[19] == started


def descendants(pid: int) -> set[int]:
    """Returns the pids of a process's children, recursively."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            parents[int(path.parent.name)] = int(fields[1])
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def cpu_s(pid: int) -> float:
    """Returns CPU seconds of a process and its descendants, including children already waited for."""
    ticks = 0
    for process in {pid, *descendants(pid)}:
        fields = _stat(Path(f"/proc/{process}/stat"))
        if fields:
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / _TICKS_PER_S


def _stat(path: Path) -> list[str]:
    """Returns the fields of /proc/<pid>/stat after the command name, starting with the state; empty if the process has exited."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
