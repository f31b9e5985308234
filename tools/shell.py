"""Runs programs to their end; a failure quotes the end of their output."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tools.errors import Failed

TAIL_LINES = 25
PROGRESS_S = 10.0


def say(message: str) -> None:
    """Prints one line of progress on stderr; stdout is for results."""
    print(message, file=sys.stderr, flush=True)


def tail(log: Path) -> str:
    """Returns the last lines of a log, indented, or a note if it is missing or empty."""
    if not log.exists():
        return f"  (no {log})"
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines) or f"  ({log} is empty)"


def output(*command: str | Path, stdin: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its stdout. Raises Failed with the end of its stderr."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, errors="replace"
    )
    if done.returncode != 0:
        said = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).splitlines()[-TAIL_LINES:])
        raise Failed(f"{' '.join(words)[:200]}: exit status {done.returncode}\n{said}")
    return done.stdout


def logged(title: str, *command: str | Path, log: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Runs a long command with its output in `log`, and prints progress every ten seconds. Raises Failed."""
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = last = time.monotonic()
    say(f"{title} ...")
    with (
        log.open("w") as out,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env={**os.environ, **(env or {})}
        ) as process,
    ):
        assert process.stdout is not None  # because of PIPE
        for number, line in enumerate(process.stdout, start=1):
            out.write(line)
            if time.monotonic() - last > PROGRESS_S:
                last = time.monotonic()
                say(f"  {last - begin:4.0f} s, {number} lines: {line.strip()[:90]}")
    if process.returncode != 0:
        raise Failed(f"{title}: exit status {process.returncode}; {log} ends with\n{tail(log)}")
    say(f"{title}: {time.monotonic() - begin:.0f} s")
