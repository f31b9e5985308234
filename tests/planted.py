"""Planted faults: a copy of a package in which one text of one module is replaced, and a program that runs with the copy.

The program runs in a process of its own, so that nothing of the product is patched.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURED = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables by which coverage would count the copy as lines of the product."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A text of a module, whose path begins with its package, and what replaces it. `home`: folder of the package."""

    home: str
    module: str
    old: str
    new: str

    @property
    def num_places(self) -> int:
        """How often the module has the text."""
        return self._path.read_text().count(self.old)

    @property
    def _path(self) -> Path:
        return ROOT / self.home / self.module

    def write(self, folder: Path) -> None:
        """Copies the package into a folder, with the fault. Raises ValueError if the text is not unique."""
        if self.num_places != 1:
            raise ValueError(f"{self.module} has the text {self.num_places} times: {self.old}")
        package = self.module.partition("/")[0]
        shutil.copytree(ROOT / self.home / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / self.module).write_text(self._path.read_text().replace(self.old, self.new))


def run_planted(replacement: Replacement, folder: Path, program: str, *arguments: str) -> str:
    """Returns the output of a Python module with the fault; empty if it finds nothing. Raises RuntimeError if it fails.

    The program prints something; its exit status is 0, or 1 with a finding.
    """
    replacement.write(folder)
    path = os.pathsep.join([str(folder), *(str(ROOT / part) for part in ("crds", "operator", "runtime", "."))])
    environment = {name: value for name, value in os.environ.items() if name not in MEASURED} | {
        "PYTHONPATH": path,
        "PHALANX_TOTALS": "",
    }
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(done.stderr)
    return done.stdout if done.returncode else ""
