"""Engines that take turns on the same prompts, until each comparison is decided."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from bench.engine.engines import Engine, Prompts, Turn
from bench.frame.figures import is_near, percentile, ratio_of

_MIN_PAIRS = 3


@dataclass(slots=True)
class Comparison:
    """Speeds of two engines, pair by pair; the ratio ours to theirs is to reach the bound."""

    name: str
    ours: str
    theirs: str
    bound: float
    our_speeds: list[float] = field(default_factory=list)
    their_speeds: list[float] = field(default_factory=list)

    def wants_more(self, pairs: int) -> bool:
        """Whether another pair would tell more: three at least, `pairs` when the ratio is near the bound."""
        if len(self.our_speeds) < min(pairs, _MIN_PAIRS):
            return True
        return len(self.our_speeds) < pairs and is_near(ratio_of(self.our_speeds, self.their_speeds), self.bound)

    @property
    def holds(self) -> bool:
        """Whether the mean ratio reaches the bound."""
        return ratio_of(self.our_speeds, self.their_speeds).mean >= self.bound

    def row(self) -> list[str]:
        """Its line of the table."""
        ratio = ratio_of(self.our_speeds, self.their_speeds)
        middle = [f"{percentile(speeds, 50):,.1f}" for speeds in (self.our_speeds, self.their_speeds)]
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        return [self.name, *middle, f"{ratio.mean:.3f}", interval, str(ratio.num_pairs), f"{self.bound:g}", _yes(self.holds)]

    def figures(self) -> dict[str, object]:
        """What goes into the JSON."""
        return asdict(self) | {"ratio": asdict(ratio_of(self.our_speeds, self.their_speeds)), "holds": self.holds}


def _program(engine: str) -> str:
    """Engines of one program begin alike: runtime, runtime-decode."""
    return engine.split("-")[0]


def _sleeps(program: str, working: str) -> bool:
    """Whether `program` has nothing to do in the turn of `working`. The router works through the runtime."""
    return program != working and (program, working) != ("runtime", "router")


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


@dataclass(slots=True)
class Match:
    """The engines by name, and what they did while it was another's turn.

    idle_shares: for each program, CPU seconds per second of every turn that it should have slept through.
    """

    engines: dict[str, Engine]
    idle_shares: dict[str, list[float]] = field(default_factory=dict)

    def turn(self, name: str, prompts: Prompts, max_tokens: int) -> Turn:
        """One engine's turn, with an eye on the others."""
        asleep = {_program(other): engine for other, engine in self.engines.items() if _sleeps(_program(other), _program(name))}
        before = {program: engine.cpu_s() for program, engine in asleep.items()}
        turn = self.engines[name].run(prompts, max_tokens)
        seconds = len(prompts) * max_tokens / turn.speed
        for program, engine in asleep.items():
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
        """Rounds until no comparison wants more: every engine still needed has one turn each, in alternating order."""
        forwards = True
        while wanting := [comparison for comparison in comparisons if comparison.wants_more(pairs)]:
            names = list(dict.fromkeys(name for comparison in wanting for name in (comparison.ours, comparison.theirs)))
            prompts = new_prompts()
            turns = {name: self.turn(name, prompts, max_tokens) for name in (names if forwards else reversed(names))}
            for comparison in wanting:
                comparison.our_speeds.append(turns[comparison.ours].speed)
                comparison.their_speeds.append(turns[comparison.theirs].speed)
            check(prompts, turns)
            forwards = not forwards
