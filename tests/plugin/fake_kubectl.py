"""A program that replaces kubectl, answers from a file and records its calls."""

import json
import pathlib
import sys
from typing import Any

_PROGRAM = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
for part, answer in json.loads((folder / "answers").read_text()):
    if part in " ".join(words):
        print(answer if isinstance(answer, str) else json.dumps(answer), end="")
        sys.exit(0)
print("Error from server (NotFound): no answer to", *words, file=sys.stderr)
sys.exit(1)
"""


class FakeKubectl:
    """An executable `kubectl` in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.answers: list[tuple[str, Any]] = []
        """Part of a command line, and the output."""
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def answer(self, part: str, output: Any) -> None:
        """Prints `output` for command lines that contain `part`."""
        self.answers.append((part, output))
        self._write()

    def _write(self) -> None:
        """Replaces the file at once: the program may be reading it."""
        new = self.folder / "answers.new"
        new.write_text(json.dumps(self.answers))
        new.replace(self.folder / "answers")

    def change(self, part: str, output: Any) -> None:
        """Replaces the answer of exactly this part of command lines."""
        self.answers = [(known, output if known == part else answer) for known, answer in self.answers]
        self._write()

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
