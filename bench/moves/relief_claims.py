"""What is claimed of moves, and judged: two modes that had the same rounds of requests in turn.

skewed    fewer preemptions, and a lower P99 of the longest gap between tokens
even      P99 TTFT, P99 TPOT and tokens per second within 5 % of no moves

By the median of the ratios of pairs of rounds: its whole interval has to be so, and where it holds the bound it is not
distinguishable. What all rounds had together stands beside and is not judged: a few rounds may make all the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.frame.client import Answer
from bench.frame.figures import Median, median_of, percentile, table

MODES = ("Off", "Migrate")
NEAR = 0.05
"""How far an even load may be from what it is without moves."""
PREEMPTIONS, GAP, TTFT, TPOT, RATE = "preemptions", "longest gap p99, ms", "ttft p99, ms", "tpot p99, ms", "tokens/s"


@dataclass(frozen=True, slots=True)
class Round:
    """What one mode did with one set of requests, or with several."""

    answers: list[Answer]
    seconds: float
    preemptions: float
    moves: dict[str, float]

    def figures(self) -> dict[str, float]:
        """Numbers of the table. Only whole answers have times."""
        whole = [answer for answer in self.answers if answer.error is None]
        tpots = [answer.tpot_s for answer in whole if answer.tpot_s is not None]
        return {
            "requests": len(self.answers),
            "failed": len(self.answers) - len(whole),
            PREEMPTIONS: self.preemptions,
            GAP: 1e3 * percentile([max(answer.gaps_s, default=0.0) for answer in whole], 99),
            TTFT: 1e3 * percentile([answer.ttft_s for answer in whole], 99),
            TPOT: 1e3 * percentile(tpots, 99),
            RATE: sum(answer.completion_tokens for answer in whole) / self.seconds,
        } | {f"moves {why}": count for why, count in sorted(self.moves.items())}


VERDICTS = {True: "yes", False: "NO", None: "not distinguishable"}
Played = dict[str, list[Round]]
"""All rounds of one load, by mode; those at the same place had the same requests."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that is judged: what it was with moves off and on over all rounds, the ratio of pairs, and whether it holds; None
    where the interval holds the bound, which tells neither."""

    what: str
    off: float
    on: float
    ratio: Median
    bound: str
    is_met: bool | None


def joined(rounds: Sequence[Round]) -> Round:
    """All rounds as one: percentiles are then of all their requests."""
    answers = [answer for one in rounds for answer in one.answers]
    names = dict.fromkeys(name for one in rounds for name in one.moves)
    moved = {name: sum(one.moves.get(name, 0.0) for one in rounds) for name in names}
    return Round(answers, sum(one.seconds for one in rounds), sum(one.preemptions for one in rounds), moved)


def judge(load: str, played: Played) -> list[Claim]:
    """What is claimed of this load. Preemptions are compared with one more of each: a round may have none."""
    off, on = (joined(played[mode]).figures() for mode in MODES)

    def ratio(name: str, more: float = 0.0) -> Median:
        pairs = zip(*(played[mode] for mode in MODES), strict=True)
        return median_of([(more + ours.figures()[name]) / (more + theirs.figures()[name]) for theirs, ours in pairs])

    def claim(name: str, found: Median, bound: str, is_met: bool | None) -> Claim:
        return Claim(name, off[name], on[name], found, bound, is_met)

    if load == "skewed":
        fewer, gap = ratio(PREEMPTIONS, more=1.0), ratio(GAP)
        return [claim(PREEMPTIONS, fewer, "fewer", lower(fewer)), claim(GAP, gap, "lower", lower(gap))]
    ttft, tpot, rate, near = ratio(TTFT), ratio(TPOT), ratio(RATE), f"{NEAR:.0%}"
    times = [claim(name, found, near, at_most(1 + NEAR, found)) for name, found in ((TTFT, ttft), (TPOT, tpot))]
    return [*times, claim(RATE, rate, near, at_least(1 - NEAR, rate))]


def lower(ratio: Median) -> bool | None:
    """Whether it is less than 1; None where its interval holds 1."""
    reaches = at_least(1.0, ratio)
    return None if reaches is None else not reaches


def at_most(bound: float, ratio: Median) -> bool | None:
    """Whether it is no more than the bound; None where its interval holds the bound."""
    return None if ratio.low <= bound < ratio.high else ratio.high <= bound


def at_least(bound: float, ratio: Median) -> bool | None:
    """Whether it is no less than the bound; None where its interval holds the bound."""
    return None if ratio.low < bound <= ratio.high else ratio.low >= bound


def show(load: str, played: Played, claims: Sequence[Claim]) -> None:
    """Both tables of one load."""
    figures = {mode: joined(played[mode]).figures() for mode in MODES}
    names = list(dict.fromkeys(name for mode in MODES for name in figures[mode]))
    print(table([load, *MODES], [[name, *(f"{figures[mode].get(name, 0.0):.1f}" for mode in MODES)] for name in names]))
    rows = []
    for claim in claims:
        pairs = [f"{claim.ratio.middle:.3f}", f"{claim.ratio.low:.3f} to {claim.ratio.high:.3f}"]
        rows.append([claim.what, f"{claim.off:.1f}", f"{claim.on:.1f}", *pairs, claim.bound, VERDICTS[claim.is_met]])
    print(table(["judged", *MODES, "median of pairs", "95 % interval", "bound", "holds"], rows) + "\n", flush=True)
