"""What an engine made of prompts, as the speculation bench counts it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from phalanx_api.speculation import SpeculationCounts


@dataclass(slots=True)
class Outcome:
    """What one engine made of one set of prompts. Seconds, tokens, draws and counts are of the steps behind the last one with
    prompt tokens: until then each engine decodes in other steps."""

    tokens: list[list[int]]
    whole_s: float = 0.0
    """Of all steps."""
    decode_s: float = 0.0
    decoded: int = 0
    draws: int = 0
    steps: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.decoded / self.decode_s if self.decode_s else 0.0

    def begin(self) -> None:
        """Forgets what was decoded beside prompts."""
        self.decode_s, self.decoded, self.draws, self.steps = 0.0, 0, 0, 0


def since(before: SpeculationCounts, now: SpeculationCounts) -> SpeculationCounts:
    """What came between two counts."""

    def less(name: str) -> list[int]:
        old: list[int] = getattr(before, name)
        return [count - (old[at] if at < len(old) else 0) for at, count in enumerate(getattr(now, name))]

    draft_s = now.draft_s - before.draft_s
    return SpeculationCounts(
        paths=now.paths - before.paths,
        proposed=less("proposed"),
        accepted=less("accepted"),
        saved=now.saved - before.saved,
        draft_s=draft_s,
    )


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Several as one: of one set of prompts after the other."""
    return Outcome(
        [tokens for one in parts for tokens in one.tokens],
        sum(one.whole_s for one in parts),
        sum(one.decode_s for one in parts),
        sum(one.decoded for one in parts),
        sum(one.draws for one in parts),
        sum(one.steps for one in parts),
        SpeculationCounts(
            paths=sum(one.counts.paths for one in parts),
            proposed=added(one.counts.proposed for one in parts),
            accepted=added(one.counts.accepted for one in parts),
            saved=sum(one.counts.saved for one in parts),
            draft_s=sum(one.counts.draft_s for one in parts),
        ),
    )


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """Position by position."""
    return [sum(part) for part in zip_longest(*counts, fillvalue=0)]
