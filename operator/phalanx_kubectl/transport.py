"""The door to a cluster: the user's own `kubectl` program, with its contexts, its credentials and its rights."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
TIMEOUT_S = 60.0


class Refused(Exception):
    """kubectl did not do it. The message has its words."""


class Kubectl(Protocol):
    """What the plugin asks of kubectl."""

    def ask(self, *words: str) -> str:
        """What kubectl prints. Raises: Refused."""
        ...

    def pass_on(self, *words: str) -> int:
        """The exit status of kubectl, which prints for itself until it ends."""
        ...


@dataclass(frozen=True, slots=True)
class KubectlProgram:
    """Runs `kubectl` with flags that every call gets."""

    program: str = "kubectl"
    flags: Sequence[str] = ()

    def ask(self, *words: str) -> str:
        """See Kubectl."""
        try:
            done = subprocess.run(
                [self.program, *self.flags, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except OSError as error:
            raise Refused(f"{self.program} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise Refused(f"{self.program} {words[0]} gave no answer in {TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise Refused(done.stderr.strip() or f"{self.program} {words[0]} ended with status {done.returncode}")
        return done.stdout

    def pass_on(self, *words: str) -> int:
        """See Kubectl."""
        try:
            return subprocess.run([self.program, *self.flags, *words]).returncode
        except OSError as error:
            raise Refused(f"{self.program} cannot be run: {error.strerror}") from error


def ask_json(kubectl: Kubectl, *words: str) -> Json:
    """The object that kubectl prints. Raises: Refused."""
    text = kubectl.ask(*words, "-o", "json")
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Refused(f"kubectl {' '.join(words)} printed no JSON") from error
    if not isinstance(read, dict):
        raise Refused(f"kubectl {' '.join(words)} printed no object")
    return read
