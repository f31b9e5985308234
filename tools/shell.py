"""Runs programs to their end; a failure quotes the end of their output."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tools.errors import Failed

TAIL_LINES = 25
PROGRESS_S = 10.0


def say(message: str) -> None:
    """Prints one line of progress on stderr; stdout is for results."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def ticking(detail: Callable[[], str], every_s: float = PROGRESS_S) -> Iterator[None]:
    """Prints every ten seconds how long the block has run, and what it does now."""
    begin, has_ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not has_ended.wait(every_s):
            say(f"  {time.monotonic() - begin:4.0f} s  {detail()}")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def progress(title: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Prints the title, progress, and at the end how long the block took."""
    begin = time.monotonic()
    say(f"{title} ...")
    with ticking(lambda: detail() or title):
        yield
    say(f"{title}: {time.monotonic() - begin:.0f} s")


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
    """Runs a long command with its output in `log`, and prints progress. Raises Failed."""
    words, last = [str(word) for word in command], ""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress(title, lambda: last),
        log.open("w") as out,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env={**os.environ, **(env or {})}
        ) as process,
    ):
        assert process.stdout is not None  # because of PIPE
        for number, line in enumerate(process.stdout, start=1):
            out.write(line)
            last = f"{number} lines: {line.strip()[:90]}"
        out.flush()
        if process.wait():
            raise Failed(f"{title}: exit status {process.returncode}; {log} ends with\n{tail(log)}")
