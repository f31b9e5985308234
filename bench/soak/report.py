"""The report of a run: slopes of every process, streams, faults and violations, as Markdown, JSON and a plot."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frame.figures import markdown_row
from bench.soak.plot import write_plot
from bench.soak.record import Run
from bench.soak.slopes import Point, Slope, Verdict, adjusted_level, slope

WARM_UP_S = 300.0
JUDGED = ("rss_kib", "anonymous_kib", "descriptors", "threads", "series", "objects", "watch_age_s", "tasks", "connections")
"""Metrics that must not grow."""
SHOWN = ("log_bytes", "used_pages", "journals")
"""Metrics that grow by nature or follow the load; their slope is shown."""
WRONG_STREAMS = ("lost", "changed", "without reference")
"""Ends of streams that must not be."""
UNITS = {
    "rss_kib": "resident, KiB",
    "anonymous_kib": "anonymous, KiB",
    "descriptors": "descriptors",
    "threads": "threads",
    "series": "exported series",
    "objects": "objects in the API server",
    "watch_age_s": "age of watches, s",
    "tasks": "tasks",
    "connections": "connections",
    "log_bytes": "log, bytes",
    "used_pages": "pages in use",
    "journals": "journals",
}


@dataclass(frozen=True, slots=True)
class Trend:
    """The slope of one metric of one process."""

    process: str
    metric: str
    level: float
    """Median of all samples."""
    slope: Slope
    is_judged: bool

    @property
    def grows(self) -> bool:
        """Whether it is a failure."""
        return self.is_judged and self.slope.verdict == "grows"

    @property
    def words(self) -> str:
        """The verdict as a sentence."""
        if not self.is_judged:
            return ""
        return {
            "none": "no slope distinguishable from zero",
            "grows": "GROWS",
            "falls": "falls",
            "too short": "too short for a verdict",
        }[self.slope.verdict]


def series_of(run: Run) -> dict[tuple[str, str], list[Point]]:
    """Returns the points of every metric of every process or role, in order of time."""
    found = dict[tuple[str, str], list[Point]]()
    for sample in run.samples:
        for process, use in sample.uses.items():
            for metric, value in use.values.items():
                found.setdefault((use.role or process, metric), []).append(Point(use.life, sample.at_s, value))
    return found


def trends_of(run: Run, warm_up_s: float) -> list[Trend]:
    """Returns the slopes of all processes. Together the intervals of judged ones hold with a probability of 95 %."""
    chosen = {key: points for key, points in series_of(run).items() if key[1] in (*JUDGED, *SHOWN)}
    level = adjusted_level(sum(metric in JUDGED for _, metric in chosen))
    order = {metric: number for number, metric in enumerate((*JUDGED, *SHOWN))}
    return [
        Trend(process, metric, _level(points), slope(points, warm_up_s, level), metric in JUDGED)
        for (process, metric), points in sorted(chosen.items(), key=lambda item: (item[0][0], order[item[0][1]]))
    ]


def _level(points: Sequence[Point]) -> float:
    return statistics.median(point.value for point in points)


def failures(run: Run, trends: Sequence[Trend]) -> list[str]:
    """Returns what must not be: lost or changed streams, violations and growth."""
    found = [f"{run.streams[name]} streams {name}" for name in WRONG_STREAMS if run.streams.get(name)]
    if not run.streams.get("whole"):
        found.append("no stream was whole")
    found += [f"{violation.at_s:.0f} s: {violation.what}" for violation in run.violations]
    growing = (trend for trend in trends if trend.grows)
    return found + [f"{trend.process}: {UNITS[trend.metric]} grows by {trend.slope.per_hour:.4g} per hour" for trend in growing]


def new_failures(former: Run, run: Run, warm_up_s: float) -> tuple[dict[str, int], int]:
    """Returns what a piece adds to the violations and wrong streams of a run, by kind, and the number of its failures."""
    ended = {name: run.streams.get(name, 0) - former.streams.get(name, 0) for name in ("whole", *WRONG_STREAMS)}
    is_fruitless = not ended.pop("whole") and run.seconds - former.seconds > warm_up_s
    counts = {f"streams {name}": count for name, count in ended.items()}
    counts["violations"] = len(run.violations) - len(former.violations)
    counts["pieces without a whole stream"] = int(is_fruitless)
    wrong = max(sum(ended.values()), counts["violations"])  # clients record a violation for each wrong stream
    return counts, wrong + is_fruitless


def new_slopes(former: Run, trends: Sequence[Trend], warm_up_s: float) -> int:
    """Returns how many slopes of a run grow that did not before its last piece. A slope needs the samples of all pieces."""
    growing = {(trend.process, trend.metric) for trend in trends if trend.grows}
    return (
        len(growing - {(trend.process, trend.metric) for trend in trends_of(former, warm_up_s) if trend.grows}) if growing else 0
    )


def markdown(run: Run, trends: Sequence[Trend], warm_up_s: float) -> str:
    """Returns the report as text."""
    settings, wrong = run.settings, failures(run, trends)
    lines = [
        f"Seed {settings.seed}, target {settings.target}{f', trace {settings.trace}' if settings.trace else ''}: "
        f"{run.seconds / 60:.0f} minutes in {len(run.pieces)} pieces, "
        f"{len(run.samples)} samples, {len(run.strikes)} faults. Warm-up of a process: {warm_up_s:.0f} s.",
        "",
        "Streams: " + (", ".join(f"{count} {name}" for name, count in sorted(run.streams.items())) or "none") + ".",
        "",
        "Faults: " + (", ".join(f"{count} {kind}" for kind, count in sorted(kinds_of(run).items())) or "none") + ".",
        "",
        "Failures: " + ("; ".join(wrong) or "none") + ".",
        "",
        f"Slopes: {_verdicts(trends)}.",
        "",
        markdown_row(["process", "metric", "level", "slope per hour", "interval", "hours", "verdict"]),
        markdown_row(["---"] * 7),
        *(markdown_row(_cells(trend)) for trend in trends),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(trends: Sequence[Trend]) -> str:
    counts = Counter(trend.slope.verdict for trend in trends if trend.is_judged)
    names: dict[Verdict, str] = {
        "none": "not distinguishable from zero",
        "grows": "grow",
        "falls": "fall",
        "too short": "too short for a verdict",
    }
    return ", ".join(f"{counts[verdict]} {name}" for verdict, name in names.items() if counts[verdict]) or "none"


def kinds_of(run: Run) -> Mapping[str, int]:
    return Counter(strike.kind for strike in run.strikes)


def _cells(trend: Trend) -> list[str]:
    found = trend.slope
    known = not math.isnan(found.per_hour)
    interval = f"{found.low:.4g} to {found.high:.4g}" if known else ""
    slope_text = f"{found.per_hour:.4g}" if known else ""
    return [*(trend.process, UNITS[trend.metric], f"{trend.level:.6g}", slope_text, interval, f"{found.hours:.2f}", trend.words)]


def document(run: Run, trends: Sequence[Trend]) -> dict[str, object]:
    """Returns the report for programs. Numbers that are not finite are null."""
    slopes = [
        {name: _finite(value) for name, value in asdict(trend.slope).items()}
        | {"process": trend.process, "metric": trend.metric, "level": trend.level, "is_judged": trend.is_judged}
        | {"verdict": trend.slope.verdict}
        for trend in trends
    ]
    return {
        "seed": run.settings.seed,
        "trace": run.settings.trace,
        "seconds": run.seconds,
        "pieces": len(run.pieces),
        "streams": run.streams,
        "faults": kinds_of(run),
        "failures": failures(run, trends),
        "slopes": slopes,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_report(folder: Path, run: Run, trends: Sequence[Trend], warm_up_s: float) -> int:
    """Writes report.md, report.json and plot.svg, prints the text, and returns 1 if there is a failure, else 0."""
    text = markdown(run, trends, warm_up_s)
    (folder / "report.md").write_text(text)
    (folder / "report.json").write_text(json.dumps(document(run, trends), indent=1, allow_nan=False))
    write_plot(folder / "plot.svg", run, series_of(run), {metric: UNITS[metric] for metric in (*JUDGED, *SHOWN)})
    print(text)
    return 1 if failures(run, trends) else 0
