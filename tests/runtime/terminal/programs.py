"""Commands of `phalanx-runtime` as processes, with pipes or a terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 120.0
_ON_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in tests that a shell runs in the background
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, sys.argv[1:])
"""
"""Starts a program whose controlling terminal is its stdin."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "phalanx_runtime", *arguments]


def environment(**values: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("OPENAI_API_KEY", "PHALANX_POD_INDEX")}
    return {**own, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", **values}


def run(*arguments: str, text: str = "", **values: str) -> subprocess.CompletedProcess[str]:
    """Returns the ended command, whose stdin had `text`."""
    ended = subprocess.run(
        command(*arguments), env=environment(**values), input=text.encode(), capture_output=True, timeout=TIMEOUT_S, check=False
    )
    return subprocess.CompletedProcess(ended.args, ended.returncode, ended.stdout.decode(), ended.stderr.decode())


class Terminal:
    """A person's side of a pseudo-terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, pattern: str) -> str:
        """Returns the text up to the end of the first match, and removes it. Raises AssertionError after a time."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, f"no {pattern} in {self.text}"
            if select.select([self._fd], [], [], 1.0)[0]:
                self.text += self._read()
        text, self.text = self.text[: found.end()], self.text[found.end() :]
        return text

    def read_all(self) -> str:
        """Returns what the program writes until it ends."""
        while chunk := self._read():
            self.text += chunk
        return self.text

    def _read(self) -> str:
        try:
            return os.read(self._fd, 4096).decode()
        except OSError:  # EIO: no process has the other end
            return ""


@contextmanager
def on_terminal(*arguments: str, **values: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Yields a terminal and the command whose controlling terminal it is: Ctrl-C reaches it."""
    own, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *command(*arguments)],
        env=environment(**values),
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    try:
        yield Terminal(own), process
    finally:
        process.kill()
        process.wait()
        os.close(own)
