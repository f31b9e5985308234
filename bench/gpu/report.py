"""Runs the parts within a budget of time, and makes table and JSON of their figures."""

import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from bench.frame.figures import table
from bench.gpu.bounds import Figure, Outcome, exit_code, skip_reason

HEADER = ("figure", "measured", "predicted", "bound", "holds")


class OutOfTime(Exception):
    """The budget ended while a part ran."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the benchmark."""

    name: str
    needed_s: float
    """About how long it takes at full size; it starts only if as much is left."""
    measure: Callable[[], Iterator[Figure]]


def run_parts(
    parts: Sequence[Part], budget_s: float, clock: Callable[[], float] = time.monotonic, *, started_s: float | None = None
) -> Iterator[Outcome]:
    """Runs each part that fits the rest of the budget. A part that raises, or runs when the budget ends, keeps its figures.

    `started_s`: time of the clock at which the budget began; None: now.
    """
    started_s = clock() if started_s is None else started_s
    for part in parts:
        spent_s = clock() - started_s
        reason = skip_reason(spent_s, part.needed_s, budget_s)
        if reason:
            yield Outcome(part=part.name, skipped=reason)
            continue
        figures, failed, skipped = list[Figure](), "", ""
        try:
            with _deadline(budget_s - spent_s):
                for figure in part.measure():
                    figures.append(figure)
        except OutOfTime:
            skipped = f"the {budget_s:.0f} s ended while it ran"
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            failed = f"{type(error).__name__}: {error}"[:2000]
        seconds = clock() - started_s - spent_s
        yield Outcome(part=part.name, figures=figures, seconds=seconds, skipped=skipped, failed=failed)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after `seconds`. Main thread only."""

    def end(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def to_text(outcomes: Sequence[Outcome]) -> str:
    """Returns the table of all figures, by part; then parts that were skipped or failed, and missed bounds."""
    rows = list[list[str]]()
    for outcome in outcomes:
        rows.append([f"{outcome.part} ({outcome.seconds:.0f} s)", "", "", "", ""])
        rows += [["  " + figure.name, *_cells(figure)] for figure in outcome.figures]
    lines = [table(HEADER, rows)]
    lines += [f"{one.part}: skipped: {one.skipped}" for one in outcomes if one.skipped]
    lines += [f"{one.part}: failed: {one.failed}" for one in outcomes if one.failed]
    for outcome in outcomes:
        for figure in outcome.figures:
            if figure.verdict in ("NO", "limited"):
                cause = f", limited by {figure.limit}" if figure.limit else ""
                lines.append(f"{outcome.part}: {figure.name} misses its bound{cause}")
    return "\n".join(lines)


def _cells(figure: Figure) -> list[str]:
    sign = "" if figure.bound is None else ">= " if figure.is_least else "<= "
    predicted = "" if figure.predicted is None else number(figure.predicted, figure.unit)
    bound = "" if figure.bound is None else sign + number(figure.bound, figure.unit)
    return [number(figure.value, figure.unit), predicted, bound, figure.verdict]


def number(value: float, unit: str) -> str:
    """Returns a value with its unit: shares in percent, others with three digits at least."""
    if unit == "share":
        return f"{value:.1%}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def to_json(outcomes: Sequence[Outcome], facts: Mapping[str, object]) -> dict[str, object]:
    """Returns facts, parts, figures with verdicts, and the exit status."""
    parts = [
        {**asdict(outcome), "figures": [asdict(figure) | {"verdict": figure.verdict} for figure in outcome.figures]}
        for outcome in outcomes
    ]
    return {**facts, "parts": parts, "exit": exit_code(outcomes)}
