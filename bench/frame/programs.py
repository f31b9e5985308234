"""Programs that a benchmark starts, waits for, watches and ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_END_S = 20.0
_LOG_TAIL = 30


@dataclass(frozen=True, slots=True)
class Program:
    """A running program that serves HTTP."""

    name: str
    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds that it and its descendants have used."""
        return cpu_s(self.process.pid)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(
    name: str, module: str, arguments: list[str], folder: Path, ready_s: float = 300.0, before: Sequence[str] = ()
) -> Iterator[Program]:
    """`python -m module arguments --host --port`, once its /readyz says 200; ended with all its children afterwards.

    before: a command that starts the command behind it in its own place, such as `nice -n 10`.

    Raises RuntimeError with the end of its log when it leaves or is not ready in time.
    """
    port = free_port()
    command = [*before, sys.executable, "-m", module, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with serving(name, command, port, "/readyz", folder, ready_s) as program:
        yield program


@contextmanager
def serving(
    name: str, command: list[str], port: int, ready_path: str, folder: Path, ready_s: float, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """A command that serves HTTP on `port`, once `ready_path` says 200; ended with all its children afterwards.

    Raises RuntimeError with the end of its log when it leaves or is not ready in time.
    """
    log, whole = folder / f"{name}.log", {**os.environ, **(env or {})}
    with ExitStack() as stack:
        with _sigterm_waits(), open(log, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=whole)
            stack.callback(end, process)
        program = Program(name, f"http://127.0.0.1:{port}", process, log)
        _wait_ready(program, ready_path, ready_s)
        yield program


@contextmanager
def _sigterm_waits() -> Iterator[None]:
    """A SIGTERM that comes within is handled right after, so that no program is started that nobody ends."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _wait_ready(program: Program, path: str, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if program.process.poll() is not None:
            raise RuntimeError(f"{program.name} left with {program.process.returncode}:\n{_tail(program.log)}")
        try:
            with urllib.request.urlopen(program.base_url + path, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{program.name} was not ready after {ready_s:.0f} s:\n{_tail(program.log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Asks a program to leave, then ends what is left of its children. Returns once they are gone."""
    children = {child: _started(child) for child in descendants(process.pid)}
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        children |= {child: _started(child) for child in descendants(process.pid)}
        process.kill()
        process.wait()
    deadline = time.monotonic() + _END_S
    while (left := [child for child, started in children.items() if _lives(child, started)]) and time.monotonic() < deadline:
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _started(pid: int) -> str:
    """When a process began, in ticks; tells it from a later one of the same id."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return fields[19] if fields else ""


def _lives(pid: int, started: str) -> bool:
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[0] != "Z" and fields[19] == started


def descendants(pid: int) -> set[int]:
    """Processes that it started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            parents[int(path.parent.name)] = int(fields[1])
    found, waiting = set[int](), {pid}
    while waiting:
        waiting = {child for child, parent in parents.items() if parent in waiting}
        found |= waiting
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, as far as they live or were waited for."""
    ticks = 0
    for one in {pid, *descendants(pid)}:
        fields = _stat(Path(f"/proc/{one}/stat"))
        if fields:
            ticks += sum(int(value) for value in fields[11:15])
    return ticks / _TICKS_PER_S


def _stat(path: Path) -> list[str]:
    """Fields of /proc/<pid>/stat after the command's name (state is the first); none when the process is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
