"""Counts of one engine's run in the speculation benchmark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from phalanx_api.speculation import SpeculationCounts


@dataclass(slots=True)
class Outcome:
    """Counts of one engine for one set of prompts.

    Counts except `tokens` and `total_s` start after the last step with prompt tokens: before it the engines decode in different
    steps.
    """

    tokens: list[list[int]]
    total_s: float = 0.0
    """Seconds of all steps."""
    decode_s: float = 0.0
    decoded: int = 0
    draws: int = 0
    steps: int = 0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def speed(self) -> float:
        return self.decoded / self.decode_s if self.decode_s else 0.0

    def restart_decoding(self) -> None:
        self.decode_s, self.decoded, self.draws, self.steps = 0.0, 0, 0, 0


def since(before: SpeculationCounts, now: SpeculationCounts) -> SpeculationCounts:
    def difference(name: str) -> list[int]:
        old: list[int] = getattr(before, name)
        return [count - (old[i] if i < len(old) else 0) for i, count in enumerate(getattr(now, name))]

    draft_s = now.draft_s - before.draft_s
    return SpeculationCounts(
        paths=now.paths - before.paths,
        drafted=difference("drafted"),
        accepted=difference("accepted"),
        saved=now.saved - before.saved,
        draft_s=draft_s,
    )


def joined(parts: Sequence[Outcome]) -> Outcome:
    return Outcome(
        [tokens for part in parts for tokens in part.tokens],
        sum(part.total_s for part in parts),
        sum(part.decode_s for part in parts),
        sum(part.decoded for part in parts),
        sum(part.draws for part in parts),
        sum(part.steps for part in parts),
        SpeculationCounts(
            paths=sum(part.counts.paths for part in parts),
            drafted=added(part.counts.drafted for part in parts),
            accepted=added(part.counts.accepted for part in parts),
            saved=sum(part.counts.saved for part in parts),
            draft_s=sum(part.counts.draft_s for part in parts),
        ),
    )


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(values) for values in zip_longest(*counts, fillvalue=0)]
