"""Files of lines in the folder of batches. All functions use the disk: call them in a thread."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx_router.batches.lines import InputLine, answered_ids, check_lines, physical_lines, read_lines
from phalanx_router.batches.records import Problem

CHUNK_LINES, CHUNK_BYTES = 64, 4 << 20
"""Of requests that one call reads; the last one may exceed the bytes."""


def check_file(path: Path, endpoint: str, must_stop: Callable[[], bool]) -> tuple[int, list[Problem]]:
    """Returns what `check_lines` does, or part of it once it must stop."""
    with path.open("rb") as file:
        return check_lines(physical_lines(file, must_stop), endpoint)


def requests(path: Path, endpoint: str) -> Iterator[InputLine]:
    """Yields the requests of an input."""
    with path.open("rb") as file:
        yield from (line for line in read_lines(physical_lines(file), endpoint) if isinstance(line, InputLine))


def take(lines: Iterator[InputLine]) -> list[InputLine]:
    """Returns the next requests, none at the end."""
    taken, size = list[InputLine](), 0
    while len(taken) < CHUNK_LINES and size < CHUNK_BYTES and (line := next(lines, None)) is not None:
        taken.append(line)
        size += len(line.body)
    return taken


def open_lines(path: Path) -> tuple[BinaryIO, set[str]]:
    """Returns the file to append to, without a last line that a crash cut short, and the ids in it."""
    file = path.open("a+b")
    file.seek(0)
    ids, end = set[str](), 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        ids |= answered_ids([text])
        end += len(text)
    file.truncate(end)
    return file, ids
