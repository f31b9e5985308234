"""Bounds of `bench.moves.relief`: two modes that play the same rounds in turn.

skewed    fewer preemptions, and a lower P99 of the longest gap between tokens
even      P99 TTFT, P99 TPOT and tokens/s within 5 % of moves off

The median of the ratios of paired rounds is judged by its whole interval. The totals of all rounds are printed but not
judged, because a few rounds may dominate them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.frame.client import Answer
from bench.frame.figures import Interval, Verdict, median_interval, percentile, table

MODES = ("Off", "Migrate")
TOLERANCE = 0.05
"""Allowed relative difference between the modes under an even load."""
PREEMPTIONS, GAP, TTFT, TPOT, RATE = "preemptions", "longest gap p99, ms", "ttft p99, ms", "tpot p99, ms", "tokens/s"


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one mode for one or several rounds."""

    answers: list[Answer]
    seconds: float
    preemptions: float
    moves: dict[str, float]

    def figures(self) -> dict[str, float]:
        """Returns the figures of the table. Failed answers have no times."""
        completed = [answer for answer in self.answers if answer.error is None]
        tpots = [answer.tpot_s for answer in completed if answer.tpot_s is not None]
        return {
            "requests": len(self.answers),
            "failed": len(self.answers) - len(completed),
            PREEMPTIONS: self.preemptions,
            GAP: 1e3 * percentile([max(answer.gaps_s, default=0.0) for answer in completed], 99),
            TTFT: 1e3 * percentile([answer.ttft_s for answer in completed], 99),
            TPOT: 1e3 * percentile(tpots, 99),
            RATE: sum(answer.completion_tokens for answer in completed) / self.seconds,
        } | {f"moves {why}": count for why, count in sorted(self.moves.items())}


Played = dict[str, list[Round]]
"""All rounds of one load by mode; equal indexes had equal requests."""


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    off: float  # over all rounds
    on: float  # over all rounds
    ratio: Interval  # of paired rounds
    bound: str
    verdict: Verdict


def merged(rounds: Sequence[Round]) -> Round:
    """Merges rounds; percentiles are then over all their requests."""
    answers = [answer for played in rounds for answer in played.answers]
    names = dict.fromkeys(name for played in rounds for name in played.moves)
    moved = {name: sum(played.moves.get(name, 0.0) for played in rounds) for name in names}
    return Round(answers, sum(played.seconds for played in rounds), sum(played.preemptions for played in rounds), moved)


def judge(load: str, played: Played) -> list[Claim]:
    off, on = (merged(played[mode]).figures() for mode in MODES)

    def ratio(name: str, added: float = 0.0) -> Interval:
        pairs = zip(*(played[mode] for mode in MODES), strict=True)
        return median_interval([(added + ours.figures()[name]) / (added + theirs.figures()[name]) for theirs, ours in pairs])

    def claim(name: str, interval: Interval, bound: str, verdict: Verdict) -> Claim:
        return Claim(name, off[name], on[name], interval, bound, verdict)

    if load == "skewed":
        fewer, gap = ratio(PREEMPTIONS, added=1.0), ratio(GAP)  # a round may have no preemptions
        return [claim(PREEMPTIONS, fewer, "fewer", is_lower(fewer)), claim(GAP, gap, "lower", is_lower(gap))]
    ttft, tpot, rate, bound = ratio(TTFT), ratio(TPOT), ratio(RATE), f"{TOLERANCE:.0%}"
    times = [
        claim(name, interval, bound, interval.verdict(1 + TOLERANCE, is_least=False))
        for name, interval in ((TTFT, ttft), (TPOT, tpot))
    ]
    return [*times, claim(RATE, rate, bound, rate.verdict(1 - TOLERANCE))]


_REVERSED: dict[Verdict, Verdict] = {"yes": "NO", "NO": "yes", "not distinguishable": "not distinguishable"}


def is_lower(ratio: Interval) -> Verdict:
    return _REVERSED[ratio.verdict(1.0)]


def print_tables(load: str, played: Played, claims: Sequence[Claim]) -> None:
    figures = {mode: merged(played[mode]).figures() for mode in MODES}
    names = list(dict.fromkeys(name for mode in MODES for name in figures[mode]))
    print(table([load, *MODES], [[name, *(f"{figures[mode].get(name, 0.0):.1f}" for mode in MODES)] for name in names]))
    rows = []
    for claim in claims:
        pairs = [f"{claim.ratio.middle:.3f}", f"{claim.ratio.low:.3f} to {claim.ratio.high:.3f}"]
        rows.append([claim.name, f"{claim.off:.1f}", f"{claim.on:.1f}", *pairs, claim.bound, claim.verdict])
    print(table(["judged", *MODES, "median of pairs", "95 % interval", "bound", "holds"], rows) + "\n", flush=True)
