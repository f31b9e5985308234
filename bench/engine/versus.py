"""Runs engines in turn on the same prompts until each comparison is decided."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from bench.engine.engines import Engine, Prompts, Turn
from bench.frame.figures import Interval, Verdict, mean_ratio, percentile

_MIN_PAIRS = 3


@dataclass(slots=True)
class Comparison:
    """Speeds of two engines in pairs; the ratio of ours to theirs must reach the bound."""

    name: str
    ours: str
    theirs: str
    bound: float
    our_speeds: list[float] = field(default_factory=list)
    their_speeds: list[float] = field(default_factory=list)

    def needs_pair(self, pairs: int) -> bool:
        """Returns whether another pair is needed: always below three, then up to `pairs` while the ratio is near the bound."""
        count = len(self.our_speeds)
        return count < min(pairs, _MIN_PAIRS) or (count < pairs and self.ratio.is_near(self.bound))

    @property
    def ratio(self) -> Interval:
        return mean_ratio(self.our_speeds, self.their_speeds)

    @property
    def verdict(self) -> Verdict:
        return self.ratio.verdict(self.bound)

    def row(self) -> list[str]:
        ratio = self.ratio
        middle = [f"{percentile(speeds, 50):,.1f}" for speeds in (self.our_speeds, self.their_speeds)]
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        return [self.name, *middle, f"{ratio.middle:.3f}", interval, str(ratio.num_pairs), f"{self.bound:g}", self.verdict]

    def figures(self) -> dict[str, object]:
        return asdict(self) | {"ratio": asdict(self.ratio), "verdict": self.verdict}


def _program(engine: str) -> str:
    """Returns the program of an engine: the name up to the first dash."""
    return engine.split("-")[0]


def _is_idle(program: str, working: str) -> bool:
    """Returns whether `program` is idle while `working` is measured. The router uses the runtime."""
    return program != working and (program, working) != ("runtime", "router")


@dataclass(slots=True)
class Match:
    """The engines by name, and their CPU use during turns of other engines."""

    engines: dict[str, Engine]
    idle_shares: dict[str, list[float]] = field(default_factory=dict)
    """CPU seconds per second of each turn in which the program is idle."""

    def turn(self, name: str, prompts: Prompts, max_tokens: int) -> Turn:
        idle = {_program(other): engine for other, engine in self.engines.items() if _is_idle(_program(other), _program(name))}
        before = {program: engine.cpu_s() for program, engine in idle.items()}
        turn = self.engines[name].run(prompts, max_tokens)
        seconds = len(prompts) * max_tokens / turn.speed
        for program, engine in idle.items():
            self.idle_shares.setdefault(program, []).append((engine.cpu_s() - before[program]) / seconds)
        return turn

    def play(
        self,
        comparisons: Sequence[Comparison],
        pairs: int,
        max_tokens: int,
        new_prompts: Callable[[], Prompts],
        check: Callable[[Prompts, dict[str, Turn]], None],
    ) -> None:
        """Plays rounds until no comparison needs a pair: each needed engine has one turn, in alternating order."""
        is_forward = True
        while open_comparisons := [comparison for comparison in comparisons if comparison.needs_pair(pairs)]:
            names = list(dict.fromkeys(name for comparison in open_comparisons for name in (comparison.ours, comparison.theirs)))
            prompts = new_prompts()
            turns = {name: self.turn(name, prompts, max_tokens) for name in (names if is_forward else reversed(names))}
            for comparison in open_comparisons:
                comparison.our_speeds.append(turns[comparison.ours].speed)
                comparison.their_speeds.append(turns[comparison.theirs].speed)
            check(prompts, turns)
            is_forward = not is_forward
