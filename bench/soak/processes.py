"""What the kernel says about a process: memory, descriptors and threads."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MEMORY = {"Rss": "rss_kib", "Pss": "pss_kib", "Anonymous": "anonymous_kib"}
"""Fields of smaps_rollup. Anonymous memory leaves out files, whose pages come and go with the page cache."""


def parse_memory(rollup: str) -> dict[str, float]:
    """Returns the memory of `/proc/<pid>/smaps_rollup` in KiB."""
    fields = dict(line.split(":", 1) for line in rollup.splitlines()[1:] if ":" in line)
    return {name: float(fields[field].split()[0]) for field, name in _MEMORY.items() if field in fields}


def parse_status(status: str) -> dict[str, float]:
    """Returns threads and resident memory of `/proc/<pid>/status`; of a process that has ended, nothing."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    found = {"threads": float(fields["Threads"])} if "Threads" in fields else {}
    return found | ({"rss_kib": float(fields["VmRSS"].split()[0])} if "VmRSS" in fields else {})


def parse_stat(stat: str) -> tuple[int, str]:
    """Returns the parent and the start time of `/proc/<pid>/stat`; a zombie has no start time."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[1]), "" if fields[0] == "Z" else fields[19]


def use_of(pid: int) -> Mapping[str, float] | None:
    """Returns memory, descriptors and threads; `None` if the process has ended or may not be read."""
    folder = Path(f"/proc/{pid}")
    try:
        found = parse_status((folder / "status").read_text())
        if "rss_kib" not in found:
            return None
        found |= parse_memory((folder / "smaps_rollup").read_text())
        return found | {"descriptors": float(len(os.listdir(folder / "fd")))}
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Child:
    """A running child of a process."""

    pid: int
    started: str
    module: str
    """The last part of its name: `rank`, `grammar_process`."""


def module_of(command: bytes) -> str:
    """Returns the last part of the module of `/proc/<pid>/cmdline`; the name of the script or program if it runs none."""
    words = command.decode(errors="replace").rstrip("\0").split("\0")
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    names = [word.rpartition("/")[2] for word in words if not word.startswith("-")]
    return names[1] if len(names) > 1 and names[0].startswith("python") else names[0]


def children(pid: int) -> list[Child]:
    """Returns a process's children, oldest first."""
    found = list[Child]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, started = parse_stat(path.read_text())
            if parent == pid and started:
                found.append(Child(int(path.parent.name), started, module_of((path.parent / "cmdline").read_bytes())))
        except OSError:
            continue
    return sorted(found, key=lambda child: (int(child.started), child.pid))


def start_of(pid: int) -> str | None:
    """Returns the start time of a process, which distinguishes it from a later one with its pid; `None` if it has ended."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())[1] or None
    except OSError:
        return None
