"""Network namespaces mounted on files of the cluster, and who lives in them.

What runs is what /proc says: no pid files, which a `kill -9` or a reboot makes lie. A process belongs to the cluster when
it is in one of the cluster's network namespaces; pods have their own, and die with their node's PID 1.
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
    """A process of the cluster: its pid on the machine and the base name of the program it was started as."""

    pid: int
    name: str


def exists(netns: Path) -> bool:
    """Whether a namespace is mounted on the file."""
    return os.path.ismount(netns)


def make(netns: Path) -> None:
    """Nothing; mounts a new network namespace, with its loopback up, on the file."""
    netns.parent.mkdir(parents=True, exist_ok=True)
    netns.touch()
    output("unshare", f"--net={netns}", "ip", "link", "set", "lo", "up")


def remove(netns: Path) -> None:
    """Nothing; the namespace goes, and with it its links, routes and rules. Does nothing where there is none."""
    while exists(netns):
        output("umount", "--lazy", netns)
    netns.unlink(missing_ok=True)


@contextmanager
def inside(netns: Path) -> Iterator[None]:
    """Nothing; the calling thread, its new sockets and its new children are in the namespace until the block is left."""
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
    """Whether the calling process lives in the namespace."""
    return exists(netns) and _same(Path("/proc/self/ns/net"), netns)


def leave(netns: Path) -> None:
    """Nothing; the calling process, if it is in the namespace, goes back to the network that it was started from.

    Inside nothing can be fetched. The nearest ancestor outside tells where that was. Raises Failed where none is left.
    """
    if not is_inside(netns):
        return
    for pid in _ancestors():
        home = Path(f"/proc/{pid}/ns/net")
        with suppress(OSError):
            if not os.path.samestat(home.stat(), netns.stat()):
                with home.open() as outside:
                    _enter(outside.fileno())
                return
    raise Failed("this works outside of the cluster's network only: begin `run` in a shell that lives as long as it does")


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.stat(), other.stat())
    except OSError:  # the process has ended, or is ending
        return False


def processes(netns: Path) -> list[Process]:
    """The processes in the namespace, but for the calling one and its ancestors."""
    if not exists(netns):
        return []
    ours = _ancestors()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours and _same(Path("/proc", entry, "ns/net"), netns):
            found.append(Process(int(entry), _program(int(entry))))
    return found


def _program(pid: int) -> str:
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return ""
    return os.path.basename(first.decode(errors="replace"))


def _ancestors() -> list[int]:
    """The pids of the calling process, its parent, and so on."""
    found: list[int] = []
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.append(pid)
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
    return found


def kill(processes: list[Process]) -> None:
    """Nothing; kills them all without asking."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
