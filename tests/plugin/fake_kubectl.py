"""A program in the place of kubectl: answers from a file, and writes down how it was called."""

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
for wanted, answer in json.loads((folder / "answers").read_text()):
    if wanted in " ".join(words):
        print(answer if isinstance(answer, str) else json.dumps(answer), end="")
        sys.exit(0)
print("Error from server (NotFound): no answer to", *words, file=sys.stderr)
sys.exit(1)
"""


class FakeKubectl:
    """`kubectl` in a folder to put on the PATH. `answers`: what is printed for a call that has these words in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.answers: list[tuple[str, Any]] = []
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)

    def answer(self, words: str, with_this: Any) -> None:
        self.answers.append((words, with_this))
        (self.folder / "answers").write_text(json.dumps(self.answers))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
