"""Whether tokens with proposals are those without, for every proposer and shape in every group under every disturbance.

    python -m bench.speculation.product [--pairs] [--proposers ngram draft self_draft] [--shapes chain tree]
        [--groups one tp2 pp2] [--disturbances ...]

A tiny model in float64, where nothing is excused, and groups of ranks as threads of this process. Each line is one proposer in
one shape in one group under one disturbance, with all ways to sample at once (greedy, seeded, filters, penalties, bias and bad
words, allowed tokens, a grammar, a JSON schema): tokens compared, the share of proposals accepted, how many of these were not the
first of their place, and what shows that the path was taken. Shapes are chains, trees that drafts choose best-first, and trees
that are chosen before. Exit 1 when a token differs, when nothing was proposed or accepted, when no tree's branch was, or when a
disturbance did not come about. With --pairs only so many cells that any two choices meet in one of them: those of CI
(tests/bench/test_speculation_pairs.py).
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from bench.moves.mover import Stream
from phalanx_api import moves, wire
from phalanx_api.speculation import Method, Tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.test_sampling import FIELDS
from tests.runtime.moving_engines import RULES, running_field
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Watched, serve

TOKENS = 32
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":20}},"required":["a","b"]}'
GROUPS: dict[str, tuple[list[int], int]] = {"one": ([1], 1), "tp2": ([2], 1), "pp2": ([2], 2)}
SHAPES: dict[str, SpeculationConfig] = {
    "chain": SpeculationConfig(num_tokens=4, is_adaptive=False),
    "tree": SpeculationConfig(num_tokens=8, is_adaptive=False, tree=Tree([3, 2])),
    "static tree": SpeculationConfig(num_tokens=8, is_adaptive=False, tree=Tree([3, 2], "static")),
}
ROOMY = Limits(max_model_len=120, max_num_seqs=11, max_num_batched_tokens=512)
DISTURBANCES: dict[str, tuple[Limits, int]] = {
    "none": (ROOMY, 200),
    "chunks of 18": (Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=18), 200),
    "prefix hits": (replace(ROOMY, max_num_seqs=3), 200),
    "preemption": (Limits(max_model_len=96, max_num_seqs=11, max_num_batched_tokens=64), 18),
    "moves": (ROOMY, 200),
}
"""Of each the limits, and the pages of the pool."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one line is of: who proposes, in which shape, in which group, and how that is disturbed."""

    proposer: Method
    shape: str
    group: str
    disturbance: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.proposer, self.shape, self.group, self.disturbance))

    @property
    def exists(self) -> bool:
        """What is looked up is known: there is one shape of trees."""
        return not (self.proposer == "ngram" and self.shape == "static tree")


PROPOSERS: tuple[Method, ...] = ("ngram", "draft", "self_draft")


def choices(proposers: Sequence[Method], shapes: Iterable[str], groups: Iterable[str], names: Iterable[str]) -> list[Choice]:
    """All that there are of these."""
    every = [Choice(*one) for one in product(proposers, shapes, groups, names)]
    return [one for one in every if one.exists]


def pairs_of(one: Choice) -> set[tuple[int, str, int, str]]:
    """Which two choices meet in it."""
    return {(a, first, b, second) for (a, first), (b, second) in combinations(enumerate(one), 2)}


def pairwise(every: Sequence[Choice]) -> list[Choice]:
    """Some of these, so that any two choices that meet in one of them all meet in one of those: the next is always the first that
    brings the most pairs."""
    left, found = set[tuple[int, str, int, str]]().union(*map(pairs_of, every)), list[Choice]()
    while left:
        found.append(max(every, key=lambda one: len(pairs_of(one) & left)))
        left -= pairs_of(found[-1])
    return found


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of one line. `branched` counts accepted proposals that were not the first, `taken` what the disturbance did."""

    tokens: int
    differ: int
    proposed: int
    accepted: int
    branched: int
    taken: int

    def holds(self, is_tree: bool) -> bool:
        """Whether all tokens are equal, and proposals, branches and the disturbance came about."""
        has_path = 0 < self.accepted < self.proposed and bool(self.branched) == is_tree
        return not self.differ and has_path and self.taken > 0


def requests() -> list[wire.Request]:
    """One for each way to sample, and some that repeat themselves. All begin alike, and with what lookups find again."""
    ways: dict[str, dict[str, Any]] = {
        **FIELDS,
        "schema": {"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)},
        "few tokens": {"temperature": 0.6, "allowed_token_ids": [3, 4, 5]},
        "few tokens, greedy": {"temperature": 0.0, "presence_penalty": 0.2, "allowed_token_ids": [3, 4, 5]},
    }
    common = [(7 * at + 3) % 40 for at in range(8)] * 3
    fields = list(ways.values())
    return [
        wire.Request(
            id=str(n),
            epoch=0,
            prompt=[*common, n, 3, 10],
            delivered=[],
            sampling=wire.Sampling(max_tokens=TOKENS, seed=7 + n, **way),
        )
        for n, way in enumerate(fields)
    ]


def served(
    folder: Path, build: Build, pods: Sequence[int], limits: Limits, rules: SchedulerConfig
) -> tuple[list[list[int]], Watched]:
    """The tokens of all requests on such a group."""

    def work(runner: ModelRunner) -> tuple[list[list[int]], Watched]:
        watched = Watched(runner)
        return [answer.tokens for answer in serve(watched, requests(), limits, rules, runner.fitting)], watched

    return on_ranks(folder, pods, build, work)


def undisturbed(folder: Path) -> list[list[int]]:
    """What each gets on one rank without proposals."""
    return served(folder, Build(torch.float64, num_pages=200), [1], ROOMY, SchedulerConfig(prefix_caching=False))[0]


def disturbed(folder: Path, name: str, build: Build, pods: Sequence[int], rules: SchedulerConfig, plain: list[list[int]]) -> Cell:
    """One line but that of moves."""
    limits, num_pages = DISTURBANCES[name]
    tokens, watched = served(folder, replace(build, num_pages=num_pages), pods, limits, rules)
    whole = sum(len(one.prompt) for one in requests()) + sum(map(len, tokens))
    found = whole - (watched.num_computed - watched.num_proposed) - watched.num_accepted - len(tokens)
    again = len(watched.admitted) - len(tokens)
    taken = {"none": 1, "chunks of 18": watched.num_chunks, "prefix hits": found, "preemption": again}[name]
    counts = watched.num_proposed, watched.num_accepted, watched.num_branched
    return Cell(sum(map(len, plain)), _differ(tokens, plain), *counts, taken)


def moved(folder: Path, build: Build, pods: list[int], rules: SchedulerConfig, plain: list[list[int]]) -> Cell:
    """Each stream moves to and fro between two groups."""
    modes: tuple[moves.MoveMode, ...] = ("precopy", "stop")
    chance = random.Random(3)
    arrived = 0
    with running_field(folder, [pods, pods], build, ROOMY, replace(rules, model=RULES.model)) as field:
        router = field.mover
        streams: list[Stream] = [router.submit(request) for request in requests()]
        for turn, mode in enumerate(modes):
            for stream in streams:
                at = chance.randrange(2 + 9 * turn, 9 + 9 * turn)
                router.until(lambda stream=stream, at=at: len(stream.tokens) >= at or stream.finish is not None)  # type: ignore[misc]
                if stream.finish is None:
                    arrived += isinstance(router.move(stream, 1 - stream.at, mode), moves.Arrived)
        router.until(lambda: all(stream.finish for stream in streams))
        counts = [group.loop.speculation for group in field.groups if group.loop is not None]
        router.settle()
    proposed, accepted = sum(sum(one.proposed) for one in counts), sum(sum(one.accepted) for one in counts)
    branched = sum(one.branched for one in counts)
    return Cell(
        sum(map(len, plain)), _differ([stream.tokens for stream in streams], plain), proposed, accepted, branched, arrived
    )


def _differ(tokens: list[list[int]], plain: list[list[int]]) -> int:
    return sum(ours != theirs for ours, theirs in zip(tokens, plain, strict=True))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.product", description="Equality, every combination.")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--proposers", nargs="+", choices=PROPOSERS, default=PROPOSERS)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--disturbances", nargs="+", choices=list(DISTURBANCES), default=list(DISTURBANCES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(_run(args, Path(temporary)))


@dataclass(frozen=True, slots=True)
class Bench:
    """The models, and what each request gets undisturbed."""

    folder: Path
    told: dict[str, dict[str, Any]]
    plain: list[list[int]]

    def cell(self, one: Choice) -> Cell:
        """What comes of one line."""
        spec = {**self.told[one.proposer], "speculative_method": one.proposer} if one.proposer != "ngram" else {}
        rules = SchedulerConfig(speculating=replace(SHAPES[one.shape], method=one.proposer, drafts=frozenset({one.proposer})))
        pods, stages = GROUPS[one.group]
        build = Build(torch.float64, num_pages=200, stages=stages, speculative=spec)
        if one.disturbance == "moves":
            return moved(self.folder, build, pods, rules, self.plain)
        return disturbed(self.folder, one.disturbance, build, pods, rules, self.plain)


def make_bench(root: Path) -> Bench:
    """Models in this folder."""
    folder = save_target(root / "model")
    told = {
        "draft": {"draft_dir": str(save_draft(folder, root / "draft", noise=0.08))},
        "self_draft": {"draft_exit": str(save_exit(folder, root / "exit.safetensors", noise=0.09))},
    }
    return Bench(folder, told, undisturbed(folder))


def _run(args: argparse.Namespace, root: Path) -> int:
    bench = make_bench(root)
    heads = ("proposer", "shape", "group", "disturbance", "tokens", "differ", "proposed", "accepted", "branched", "taken")
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|", flush=True)
    every = choices(args.proposers, args.shapes, args.groups, args.disturbances)
    wrong = 0
    for one in pairwise(every) if args.pairs else every:
        cell = bench.cell(one)
        holds = cell.holds(is_tree=one.shape != "chain")
        wrong += not holds
        share = cell.accepted / max(1, cell.proposed)
        line = f"{cell.tokens} | {cell.differ} | {cell.proposed} | {share:.2f} | {cell.branched} | {cell.taken}"
        print(f"| {' | '.join(one)} | {line} |{'' if holds else ' WRONG'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
