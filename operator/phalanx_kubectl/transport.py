"""Calls the user's `kubectl`."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx_api import labels

Json = dict[str, Any]
TIMEOUT_S = 60.0


class KubectlFailed(Exception):
    """The message is kubectl's."""


class Lines(Protocol):
    """The output of a running kubectl."""

    def __iter__(self) -> Iterator[str]:
        """Returns the lines as they arrive. Raises KubectlFailed at the end if kubectl fails without being stopped."""
        ...

    def stop(self) -> None:
        """Ends kubectl, from any thread."""
        ...


class Kubectl(Protocol):
    """Calls of kubectl."""

    def read(self, *arguments: str) -> str:
        """Returns kubectl's output. Raises KubectlFailed."""
        ...

    def run_attached(self, *arguments: str) -> int:
        """Runs kubectl on the terminal. Returns its exit status. Raises KubectlFailed."""
        ...

    def follow(self, *arguments: str) -> Lines:
        """Starts kubectl. Raises KubectlFailed."""
        ...


class ProgramLines:
    """The output of a process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        self._is_stopped = False

    def __iter__(self) -> Iterator[str]:
        """See Lines."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None, "all are pipes"
        with process.stdin, process.stdout, process.stderr:
            yield from process.stdout
            error = process.stderr.read().strip()
        if process.wait() and not self._is_stopped:
            raise KubectlFailed(error or f"kubectl ended with status {process.returncode}")

    def stop(self) -> None:
        """See Lines."""
        self._is_stopped = True
        self._process.terminate()


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

    def follow(self, *arguments: str) -> ProgramLines:
        """See Kubectl."""
        try:
            return ProgramLines([self.program, *self.flags, *arguments])
        except OSError as error:
            raise KubectlFailed(f"{self.program} cannot be run: {error.strerror}") from error


def metrics_path(metadata: Json) -> str:
    """Returns the path of a router's metrics at the API server, which accepts any certificate. metadata: of the pod."""
    scheme = (metadata.get("annotations") or {}).get(labels.SCHEME, "http")
    pod = f"{scheme}:{metadata['name']}:{labels.HTTP_PORT}"
    return f"/api/v1/namespaces/{metadata.get('namespace', '')}/pods/{pod}/proxy/metrics"


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
