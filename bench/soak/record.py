"""The record of a run: lines of JSON, appended while it runs. It is also the checkpoint from which a run resumes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

FILE = "record.jsonl"


class Settings(msgspec.Struct, frozen=True, tag="settings"):
    """What a resumed run must repeat."""

    target: str
    seed: int
    groups: int
    clients: int
    fault_every_s: float
    trace: str = ""
    """File of the conversations; empty: they are drawn."""


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A start of the run: the first one or a resumed one."""

    number: int
    at_s: float
    """Seconds that earlier pieces ran."""
    unix_s: float


class Use(msgspec.Struct, frozen=True):
    """What one process uses."""

    life: str
    """Changes when the process is replaced."""
    values: dict[str, float]
    role: str = ""
    """Processes of one role have a slope together; without it the name is the role."""


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One look at everything. Counts of streams are those of all pieces together."""

    at_s: float
    piece: int
    uses: dict[str, Use]
    streams: dict[str, int]
    conversations: int
    """Number of the next conversation."""
    is_idle: bool = False
    """No client asks, and each request has ended."""


class Strike(msgspec.Struct, frozen=True, tag="strike"):
    """A fault that the run caused."""

    at_s: float
    number: int
    kind: str
    outcome: str


class Violation(msgspec.Struct, frozen=True, tag="violation"):
    """Something that must not happen: a lost stream, another text, a page that does not return."""

    at_s: float
    what: str


Line = Settings | Piece | Sample | Strike | Violation
_decode = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class Run:
    """What the lines of a record say."""

    settings: Settings
    pieces: Sequence[Piece] = ()
    samples: Sequence[Sample] = ()
    strikes: Sequence[Strike] = ()
    violations: Sequence[Violation] = ()
    streams: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long all pieces ran."""
        return max((line.at_s for lines in (self.pieces, self.samples, self.strikes) for line in lines), default=0.0)

    @property
    def next_strike(self) -> int:
        return max((strike.number + 1 for strike in self.strikes), default=0)

    @property
    def next_conversation(self) -> int:
        return self.samples[-1].conversations if self.samples else 0


def parse(content: bytes) -> Run:
    """Returns the run. A last line without its newline was being written when the run was killed, and is ignored.

    Raises ValueError for a record without settings; msgspec.DecodeError for another line that is not one.
    """
    lines: list[Line] = [_decode(line) for line in content.split(b"\n")[:-1]]
    settings = [line for line in lines if isinstance(line, Settings)]
    if not settings:
        raise ValueError("the record has no settings")
    samples = [line for line in lines if isinstance(line, Sample)]
    return Run(
        settings[0],
        [line for line in lines if isinstance(line, Piece)],
        samples,
        [line for line in lines if isinstance(line, Strike)],
        [line for line in lines if isinstance(line, Violation)],
        dict(samples[-1].streams) if samples else {},
    )


def read(folder: Path) -> Run | None:
    """Returns the run of a folder; `None` if none was started there. Raises as `parse`."""
    path = folder / FILE
    return parse(path.read_bytes()) if path.exists() and b"\n" in path.read_bytes() else None


class Recorder:
    """Appends lines. A line survives SIGKILL of the run once `add` returns, but not a crash of the machine."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        self._file: BinaryIO = open(path, "ab")
        _cut_incomplete_line(path)

    def add(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut_incomplete_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
