"""Daemons: started apart from the terminal with a log of their own, and waited for without hanging."""

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
    """A program that was started: what to call it, its process, and the log that explains its end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def start(name: str, *command: str | Path, log: Path, env: Mapping[str, str] | None = None) -> Daemon:
    """The daemon, just started. It outlives this process."""
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
        )
    return Daemon(name, process, log)


def wait_until(what: str, is_so: Callable[[], bool], limit_s: float, daemon: Daemon) -> None:
    """Nothing, once is_so(). Raises Failed with the end of the daemon's log when it ends first or the limit passes."""
    end = time.monotonic() + limit_s
    while not is_so():
        if daemon.process.poll() is not None:
            raise Failed(
                f"{what}: {daemon.name} ended with status {daemon.process.returncode}; {daemon.log} ends with\n{tail(daemon.log)}"
            )
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {limit_s:.0f} s; {daemon.log} ends with\n{tail(daemon.log)}")
        time.sleep(POLL_S)
