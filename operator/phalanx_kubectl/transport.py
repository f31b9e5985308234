"""Calls the user's `kubectl` program, with its contexts, credentials and permissions."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
TIMEOUT_S = 60.0


class KubectlFailed(Exception):
    """kubectl failed. The message is kubectl's."""


class Kubectl(Protocol):
    """The plugin's calls of kubectl."""

    def ask(self, *words: str) -> str:
        """Returns kubectl's output. Raises KubectlFailed."""
        ...

    def pass_on(self, *words: str) -> int:
        """Runs kubectl with the terminal's output. Returns its exit status."""
        ...


@dataclass(frozen=True, slots=True)
class KubectlProgram:
    """Runs `kubectl` with the same flags in each call."""

    program: str = "kubectl"
    flags: Sequence[str] = ()

    def ask(self, *words: str) -> str:
        """See Kubectl."""
        try:
            done = subprocess.run(
                [self.program, *self.flags, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except OSError as error:
            raise KubectlFailed(f"{self.program} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise KubectlFailed(f"{self.program} {words[0]} did not answer within {TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise KubectlFailed(done.stderr.strip() or f"{self.program} {words[0]} ended with status {done.returncode}")
        return done.stdout

    def pass_on(self, *words: str) -> int:
        """See Kubectl."""
        try:
            return subprocess.run([self.program, *self.flags, *words]).returncode
        except OSError as error:
            raise KubectlFailed(f"{self.program} cannot be run: {error.strerror}") from error


def ask_json(kubectl: Kubectl, *words: str) -> Json:
    """Returns the object that kubectl prints. Raises KubectlFailed."""
    text = kubectl.ask(*words, "-o", "json")
    try:
        read = json.loads(text)
    except ValueError as error:
        raise KubectlFailed(f"kubectl {' '.join(words)} printed no JSON") from error
    if not isinstance(read, dict):
        raise KubectlFailed(f"kubectl {' '.join(words)} printed no object")
    return read
