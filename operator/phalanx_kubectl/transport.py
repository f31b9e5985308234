"""Calls the user's `kubectl`."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
TIMEOUT_S = 60.0


class KubectlFailed(Exception):
    """The message is kubectl's."""


class Kubectl(Protocol):
    """Calls of kubectl."""

    def read(self, *arguments: str) -> str:
        """Returns kubectl's output. Raises KubectlFailed."""
        ...

    def run_attached(self, *arguments: str) -> int:
        """Runs kubectl on the terminal. Returns its exit status. Raises KubectlFailed."""
        ...


@dataclass(frozen=True, slots=True)
class KubectlProgram:
    """Runs `kubectl` with the same flags each time."""

    program: str = "kubectl"
    flags: Sequence[str] = ()

    def read(self, *arguments: str) -> str:
        """See Kubectl."""
        try:
            result = subprocess.run(
                [self.program, *self.flags, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except OSError as error:
            raise KubectlFailed(f"{self.program} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise KubectlFailed(f"{self.program} {arguments[0]} did not answer within {TIMEOUT_S:.0f} s") from error
        if result.returncode:
            raise KubectlFailed(result.stderr.strip() or f"{self.program} {arguments[0]} ended with status {result.returncode}")
        return result.stdout

    def run_attached(self, *arguments: str) -> int:
        """See Kubectl."""
        try:
            return subprocess.run([self.program, *self.flags, *arguments]).returncode
        except OSError as error:
            raise KubectlFailed(f"{self.program} cannot be run: {error.strerror}") from error


def read_json(kubectl: Kubectl, *arguments: str) -> Json:
    """Returns the object that kubectl prints. Raises KubectlFailed."""
    text = kubectl.read(*arguments, "-o", "json")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise KubectlFailed(f"kubectl {' '.join(arguments)} printed no JSON") from error
    if not isinstance(value, dict):
        raise KubectlFailed(f"kubectl {' '.join(arguments)} printed no object")
    return value
