"""Network namespaces, mounted on files of the cluster, and their processes.

Processes are found in /proc by their network namespace. Pods have their own, and end with their node's PID 1.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.errors import Failed
from tools.shell import output

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """A process with its PID on the machine and the name of its program."""

    pid: int
    name: str


def exists(netns: Path) -> bool:
    """Whether a namespace is mounted on the file."""
    return os.path.ismount(netns)


def make(netns: Path) -> None:
    """Mounts a new network namespace, with loopback up, on the file."""
    netns.parent.mkdir(parents=True, exist_ok=True)
    netns.touch()
    output("unshare", f"--net={netns}", "ip", "link", "set", "lo", "up")


def remove(netns: Path) -> None:
    """Removes a namespace, if it exists, with its links, routes and rules."""
    while exists(netns):
        output("umount", "--lazy", netns)
    netns.unlink(missing_ok=True)


@contextmanager
def inside(netns: Path) -> Iterator[None]:
    """Moves the calling thread, its new sockets and children into the namespace."""
    with open("/proc/thread-self/ns/net") as home, netns.open() as target:
        _enter(target.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise Failed(f"cannot enter a network namespace: {os.strerror(error)}")


def is_inside(netns: Path) -> bool:
    """Whether the calling process is in the namespace."""
    return exists(netns) and _is_same(Path("/proc/self/ns/net"), netns)


def leave(netns: Path) -> None:
    """Moves the calling process out of the namespace, which has no downloads, into that of an ancestor. Raises Failed without one
    outside."""
    if not is_inside(netns):
        return
    for pid in _ancestors():
        home = Path(f"/proc/{pid}/ns/net")
        with suppress(OSError):
            if not os.path.samestat(home.stat(), netns.stat()):
                with home.open() as outside:
                    _enter(outside.fileno())
                return
    raise Failed("this works only outside the cluster's network: start `run` in a shell that outlives it")


def _is_same(first: Path, second: Path) -> bool:
    try:
        return os.path.samestat(first.stat(), second.stat())
    except OSError:  # the process has ended, or is ending
        return False


def processes(netns: Path) -> list[Process]:
    """Returns the processes in the namespace, except the calling one and its ancestors."""
    if not exists(netns):
        return []
    own = _ancestors()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in own and _is_same(Path("/proc", entry, "ns/net"), netns):
            found.append(Process(int(entry), _program(int(entry))))
    return found


def _program(pid: int) -> str:
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return ""
    return os.path.basename(first.decode(errors="replace"))


def _ancestors() -> list[int]:
    """Returns the PIDs of the calling process and its ancestors."""
    found: list[int] = []
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.append(pid)
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
    return found


def kill(processes: list[Process]) -> None:
    """Sends SIGKILL to all processes."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
