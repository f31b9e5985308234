"""Tables of the bench."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench.frame.figures import markdown_header, markdown_row
from bench.router.answers import figures
from bench.router.answers.figures import DEFAULT_THRESHOLD, LEAST_PRECISION, MOST_UNRELATED, Point, Scored
from bench.router.answers.lookups import look_up
from bench.router.answers.pairs import Pair
from bench.router.answers.vectors import Vectors

NEAREST = (1, 4, 16)
PARAPHRASES_KEPT = 95
"""Percent of the paraphrases above the threshold at which unrelated pairs are counted."""


def guard_table(parts: Mapping[str, Sequence[Scored]]) -> str:
    """Returns what the guard alone lets pass, and the near-misses among it."""
    passing = ["near-misses that pass", "95 % interval"]
    rows = [markdown_header(["pairs", "paraphrases that pass", *passing, "precision", "95 % interval", "recall"])]
    for part, scored in parts.items():
        at = figures.point(scored, -2.0, is_guarded=True)
        near = len(scored) - at.all_same
        wrong = [f"{at.wrong} of {near}", _percents(figures.wilson(at.wrong, near))]
        rows.append(markdown_row([part, f"{at.right} of {at.all_same}", *wrong, *_shares(at)]))
    missed = [one.pair for scored in parts.values() for one in scored if one.is_guarded and not one.pair.is_same]
    examples = [f'"{pair.asked}" passes for "{pair.stored}" ({pair.kind}).' for pair in missed]
    kinds = [_kinds_line(part, scored) for part, scored in parts.items()]
    return "\n".join([*rows, "", *kinds, *(["", *examples] if examples else [])])


def _kinds_line(part: str, scored: Sequence[Scored]) -> str:
    """Returns the near-misses that pass the guard by the kind of their difference."""
    near = [one for one in scored if not one.pair.is_same]
    wrong = Counter(one.pair.kind for one in near if one.is_guarded)
    kinds = ", ".join(f"{kind} {wrong[kind]} of {count}" for kind, count in Counter(one.pair.kind for one in near).most_common())
    return f"Near-misses that pass, {part}: {kinds}."


def methods_table(rows: Sequence[tuple[str, str, Sequence[Scored], Vectors]]) -> str:
    """Returns a row per method and remedy: mean cosines, how they rank pairs, and the recall at a precision of 99 %."""
    head = ["vector", "remedy", "paraphrases", "near-misses", "unrelated", "paraphrases above near-misses"]
    head += [f"unrelated above {PARAPHRASES_KEPT} % of paraphrases", "recall at 99 %, guard", "without"]
    lines = [markdown_header(head)]
    for name, remedy, scored, unrelated in rows:
        same, near = ([one.cosine for one in scored if one.pair.is_same is kind] for kind in (True, False))
        above = float((unrelated >= np.percentile(same, 100 - PARAPHRASES_KEPT)).mean())
        means = [f"{mean:.2f}" for mean in (statistics.fmean(same), statistics.fmean(near), float(unrelated.mean()))]
        recalls = [f"{figures.best_recall(scored, is_guarded=is_guarded):.0%}" for is_guarded in (True, False)]
        lines.append(markdown_row([name, remedy, *means, f"{figures.area(scored):.0%}", f"{above:.1%}", *recalls]))
    return "\n".join(lines)


def threshold_table(scored: Sequence[Scored], unrelated: Vectors) -> str:
    """Returns precision and recall by threshold."""
    guarded = ["precision with guard", "95 % interval", "recall with guard"]
    lines = [markdown_header(["threshold", *guarded, "precision without", "95 % interval", "recall without", "unrelated above"])]
    for threshold in figures.THRESHOLDS:
        points = [figures.point(scored, threshold, is_guarded=is_guarded) for is_guarded in (True, False)]
        above = f"{float((unrelated >= threshold).mean()):.1%}"
        lines.append(markdown_row([f"{threshold:.2f}", *(cell for at in points for cell in _shares(at)), above]))
    return "\n".join(lines)


def choice(scored: Sequence[Scored], unrelated: Vectors) -> str:
    """Returns lines about the lowest threshold with a precision of 99 %, and about the default one."""
    lowest = [figures.lowest_threshold(scored, is_guarded=is_guarded) for is_guarded in (True, False)]
    selective = figures.lowest_threshold(scored, unrelated, is_guarded=True)
    at, crossed = figures.point(scored, DEFAULT_THRESHOLD, is_guarded=True), figures.cross_validated(scored, unrelated)
    served = [one.pair for one in scored if one.is_guarded and one.cosine >= DEFAULT_THRESHOLD]
    kinds = Counter(pair.kind for pair in served if not pair.is_same)
    passing = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "none"
    least = f"{LEAST_PRECISION:.0%}"
    return "\n".join(
        [
            f"lowest threshold with {least} precision: {_or_none(lowest[0])} with the guard, {_or_none(lowest[1])} without",
            f"with at most {MOST_UNRELATED:.0%} of unrelated pairs above it: {_or_none(selective)}",
            f"the same, chosen without the family of each pair: {' '.join(_shares(crossed)[:2])}, recall {crossed.recall:.0%}",
            f"default {DEFAULT_THRESHOLD:.2f}: precision {' '.join(_shares(at)[:2])}, recall {at.recall:.0%}",
            f"near-misses that pass it: {passing}",
        ]
    )


def lookup_table(pairs: Sequence[Pair], vectors: Mapping[str, Vectors], is_alike: Callable[[str, str], bool]) -> str:
    """Returns the outcomes of lookups at the default threshold by the number of nearest texts that the guard compares."""
    lines = [markdown_header(["nearest compared", "guard", "right", "wrong", "precision", "95 % interval", "recall"])]
    for nearest, guard in (*((nearest, "with") for nearest in NEAREST), (1, "without")):
        check = is_alike if guard == "with" else _is_anything_alike
        found = look_up(pairs, vectors, check, nearest=nearest, threshold=DEFAULT_THRESHOLD)
        at = Point(DEFAULT_THRESHOLD, found.right, found.wrong, found.answerable)
        lines.append(markdown_row([str(nearest), guard, f"{at.right} of {at.all_same}", str(at.wrong), *_shares(at)]))
    return "\n".join(lines)


def _is_anything_alike(asked: str, stored: str) -> bool:
    return True


def _shares(at: Point) -> list[str]:
    served = at.right + at.wrong
    return [f"{at.precision:.1%}" if served else "none served", _percents(at.interval) if served else "", f"{at.recall:.0%}"]


def _percents(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


def _or_none(threshold: float | None) -> str:
    return "none" if threshold is None else f"{threshold:.2f}"
