"""Runs a client's program in its environment, without our packages and without the proxies of this machine."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.clients.environments import ROOT, node_modules, python_of
from bench.clients.programs.checks import Server
from bench.clients.results import read_checks, tail

TIMEOUT_S = 600
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy")
DIRECT = "127.0.0.1,localhost"


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """Of one client."""

    server: Server
    model: Path
    """Its folder, for clients that tokenize."""
    folder: Path
    """For files and logs of the client."""

    def call(
        self, *command: str, cwd: Path | None = None, path: str = "", more: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Returns exit status and output of a command. `path`: its PYTHONPATH. `more`: further variables."""
        variables = {
            "CLIENT_URL": self.server.url,
            "CLIENT_KEY": self.server.key,
            "CLIENT_MODEL": self.server.model,
            "OPENAI_API_KEY": self.server.key,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONPATH": path,
            **(more or {}),
        }
        try:
            done = subprocess.run(
                command,
                cwd=cwd or self.folder,
                env=direct(os.environ) | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            status, output = -1, f"no end after {TIMEOUT_S} s"
        (self.folder / f"{Path(command[0]).name}.log").write_text(output)
        return status, output


def direct(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those of proxies, in either case: a request to the server reaches it, not a proxy."""
    kept = {name: value for name, value in variables.items() if name.lower() not in (*PROXIES, "no_proxy")}
    return {**kept, "NO_PROXY": DIRECT, "no_proxy": DIRECT}


def run_program(setup: ClientSetup, environment: str, module: str) -> tuple[list[str], str]:
    """Returns the names of the checks of a program in Python, and why it failed."""
    python = python_of(environment)
    return _checks(*setup.call(str(python), "-m", f"bench.clients.programs.{module}", path=str(ROOT)))


def run_node(setup: ClientSetup) -> tuple[list[str], str]:
    """Returns the names of the checks of our program for node, and why it failed. Raises Missing without node."""
    return _checks(*setup.call("node", "ai.mjs", cwd=node_modules()))


def _checks(status: int, output: str) -> tuple[list[str], str]:
    names, failures = read_checks(output)
    return names, "; ".join(failures) or (tail(output) if status or not names else "")
