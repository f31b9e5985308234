"""Daemons with their own sessions and logs."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.errors import Failed
from tools.shell import tail

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Daemon:
    """A started program and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def start(name: str, *command: str | Path, log: Path, env: Mapping[str, str] | None = None, group: int | None = None) -> Daemon:
    """Starts a daemon that outlives this process, with a group ID of its own for packet filters."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd="/",
            start_new_session=True,
            group=group,
        )
    return Daemon(name, process, log)


def wait_for_daemon(description: str, condition: Callable[[], bool], limit_s: float, daemon: Daemon) -> None:
    """Waits for a condition. Raises Failed with the end of the log if the daemon exits or the limit passes."""
    end = time.monotonic() + limit_s
    while not condition():
        if daemon.process.poll() is not None:
            status = daemon.process.returncode
            raise Failed(f"{description}: {daemon.name} exited with {status}; {daemon.log} ends with\n{tail(daemon.log)}")
        if time.monotonic() > end:
            raise Failed(f"{description}: not within {limit_s:.0f} s; {daemon.log} ends with\n{tail(daemon.log)}")
        time.sleep(POLL_S)
