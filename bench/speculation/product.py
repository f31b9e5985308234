"""Checks that tokens with speculation equal those without, for every method, shape, group and disturbance.

    python -m bench.speculation.product [--pairs] [--methods ngram draft self_draft] [--shapes chain tree]
        [--groups one tp2 pp2] [--disturbances ...]

Uses a tiny model in float64 without near-ties; the ranks of a group are threads of this process. A row is one combination with
all sampling modes (greedy, seeded, filters, penalties, bias and bad words, allowed tokens, a grammar, a JSON schema): tokens
compared, outputs that differ, draft tokens, acceptance rate, accepted tokens that were not the first child, and events of the
disturbance. Exits with 1 if an output differs, no token was accepted or rejected, a tree's branch was never accepted, or the
disturbance had no effect. With `--pairs` only the combinations in which every two choices meet at least once, like
tests/bench/test_speculation_pairs.py.
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

from bench.frame.figures import markdown_header, markdown_row
from bench.moves.mover import Stream
from phalanx_api import moves, wire
from phalanx_api.speculation import Method, Tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.drafts import save_draft, save_exit, save_target
from tests.runtime.equality.requests import FIELDS
from tests.runtime.moving_engines import RULES, running_groups
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import CountingRunner, serve

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
"""Limits and pages of the pool."""


@dataclass(frozen=True, slots=True)
class Choice:
    method: Method
    shape: str
    group: str
    disturbance: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.method, self.shape, self.group, self.disturbance))

    @property
    def exists(self) -> bool:
        """Whether the combination exists: n-gram trees have one shape."""
        return not (self.method == "ngram" and self.shape == "static tree")


METHODS: tuple[Method, ...] = ("ngram", "draft", "self_draft")


def choices(methods: Sequence[Method], shapes: Iterable[str], groups: Iterable[str], names: Iterable[str]) -> list[Choice]:
    combined = [Choice(*values) for values in product(methods, shapes, groups, names)]
    return [choice for choice in combined if choice.exists]


def pairs_of(choice: Choice) -> set[tuple[int, str, int, str]]:
    return {(a, first, b, second) for (a, first), (b, second) in combinations(enumerate(choice), 2)}


def pairwise(every: Sequence[Choice]) -> list[Choice]:
    """Returns combinations that contain every pair of choices, greedily: each next one adds the most missing pairs."""
    missing, found = set[tuple[int, str, int, str]]().union(*map(pairs_of, every)), list[Choice]()
    while missing:
        found.append(max(every, key=lambda choice: len(pairs_of(choice) & missing)))
        missing -= pairs_of(found[-1])
    return found


@dataclass(frozen=True, slots=True)
class Result:
    num_tokens: int
    num_different: int
    num_drafted: int
    num_accepted: int
    num_branched: int  # accepted tokens that were not the first child of their position
    num_events: int  # events of the disturbance

    def holds(self, is_tree: bool) -> bool:
        """Returns whether outputs are equal, tokens were accepted and rejected, and branches and disturbance had effect."""
        has_path = 0 < self.num_accepted < self.num_drafted and bool(self.num_branched) == is_tree
        return not self.num_different and has_path and self.num_events > 0


def requests() -> list[wire.Request]:
    """Returns a request for each sampling mode. Prompts repeat themselves, so that n-grams match, and share a prefix."""
    modes: dict[str, dict[str, Any]] = {
        **FIELDS,
        "schema": {"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)},
        "few tokens": {"temperature": 0.6, "allowed_token_ids": [3, 4, 5]},
        "few tokens, greedy": {"temperature": 0.0, "presence_penalty": 0.2, "allowed_token_ids": [3, 4, 5]},
    }
    common = [(7 * index + 3) % 40 for index in range(8)] * 3
    fields = list(modes.values())
    return [
        wire.Request(
            id=str(n),
            epoch=0,
            prompt=[*common, n, 3, 10],
            delivered=[],
            sampling=wire.Sampling(max_tokens=TOKENS, seed=7 + n, **mode),
        )
        for n, mode in enumerate(fields)
    ]


def served(
    folder: Path, build: Build, pods: Sequence[int], limits: Limits, config: SchedulerConfig
) -> tuple[list[list[int]], CountingRunner]:
    """Returns the tokens of all requests on a group of these pods, and the runner with its counts."""

    def work(runner: ModelRunner) -> tuple[list[list[int]], CountingRunner]:
        watched = CountingRunner(runner)
        return [answer.tokens for answer in serve(watched, requests(), limits, config, runner.fitting)], watched

    return on_ranks(folder, pods, build, work)


def undisturbed(folder: Path) -> list[list[int]]:
    return served(folder, Build(torch.float64, num_pages=200), [1], ROOMY, SchedulerConfig(prefix_caching=False))[0]


def disturbed(
    folder: Path, name: str, build: Build, pods: Sequence[int], config: SchedulerConfig, plain: list[list[int]]
) -> Result:
    limits, num_pages = DISTURBANCES[name]
    tokens, watched = served(folder, replace(build, num_pages=num_pages), pods, limits, config)
    num_tokens = sum(len(request.prompt) for request in requests()) + sum(map(len, tokens))
    num_found = num_tokens - (watched.num_computed - watched.num_proposed) - watched.num_accepted - len(tokens)
    num_readmitted = len(watched.admitted) - len(tokens)
    num_events = {"none": 1, "chunks of 18": watched.num_chunks, "prefix hits": num_found, "preemption": num_readmitted}[name]
    counts = watched.num_proposed, watched.num_accepted, watched.num_branched
    return Result(sum(map(len, plain)), _num_different(tokens, plain), *counts, num_events)


def moved(folder: Path, build: Build, pods: list[int], config: SchedulerConfig, plain: list[list[int]]) -> Result:
    modes: tuple[moves.MoveMode, ...] = ("precopy", "stop")
    rng = random.Random(3)
    num_moved = 0
    with running_groups(folder, [pods, pods], build, ROOMY, replace(config, model=RULES.model)) as groups:
        router = groups.mover
        streams: list[Stream] = [router.submit(request) for request in requests()]
        for turn, mode in enumerate(modes):
            for stream in streams:
                position = rng.randrange(2 + 9 * turn, 9 + 9 * turn)
                router.until(lambda stream=stream, position=position: len(stream.tokens) >= position or stream.finish is not None)  # type: ignore[misc]
                if stream.finish is None:
                    num_moved += isinstance(router.move(stream, 1 - stream.group, mode), moves.Arrived)
        router.until(lambda: all(stream.finish for stream in streams))
        counts = [group.loop.speculation for group in groups.groups if group.loop is not None]
        router.settle()
    drafted, accepted = sum(sum(count.drafted) for count in counts), sum(sum(count.accepted) for count in counts)
    branched = sum(count.branched for count in counts)
    return Result(
        sum(map(len, plain)), _num_different([stream.tokens for stream in streams], plain), drafted, accepted, branched, num_moved
    )


def _num_different(tokens: list[list[int]], plain: list[list[int]]) -> int:
    return sum(ours != theirs for ours, theirs in zip(tokens, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation.product", description="Checks equal tokens for every combination."
    )
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--disturbances", nargs="+", choices=list(DISTURBANCES), default=list(DISTURBANCES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(_run(args, Path(temporary)))


@dataclass(frozen=True, slots=True)
class Bench:
    """Models, and the tokens of all requests without speculation."""

    folder: Path
    settings: dict[str, dict[str, Any]]
    plain: list[list[int]]

    def run(self, choice: Choice) -> Result:
        spec = {**self.settings[choice.method], "speculative_method": choice.method} if choice.method != "ngram" else {}
        config = SchedulerConfig(
            speculation=replace(SHAPES[choice.shape], method=choice.method, draft_methods=frozenset({choice.method}))
        )
        pods, stages = GROUPS[choice.group]
        build = Build(torch.float64, num_pages=200, stages=stages, speculative=spec)
        if choice.disturbance == "moves":
            return moved(self.folder, build, pods, config, self.plain)
        return disturbed(self.folder, choice.disturbance, build, pods, config, self.plain)


def make_bench(root: Path) -> Bench:
    folder = save_target(root / "model")
    settings = {
        "draft": {"draft_dir": str(save_draft(folder, root / "draft", noise=0.08))},
        "self_draft": {"draft_exit": str(save_exit(folder, root / "exit.safetensors", noise=0.09))},
    }
    return Bench(folder, settings, undisturbed(folder))


def _run(args: argparse.Namespace, root: Path) -> int:
    bench = make_bench(root)
    header = (
        "method",
        "shape",
        "group",
        "disturbance",
        "tokens",
        "different",
        "draft tokens",
        "acceptance",
        "branched",
        "events",
    )
    print(markdown_header(header), flush=True)
    every = choices(args.methods, args.shapes, args.groups, args.disturbances)
    num_wrong = 0
    for choice in pairwise(every) if args.pairs else every:
        result = bench.run(choice)
        holds = result.holds(is_tree=choice.shape != "chain")
        num_wrong += not holds
        rate = result.num_accepted / max(1, result.num_drafted)
        cells = (
            *choice,
            result.num_tokens,
            result.num_different,
            result.num_drafted,
            f"{rate:.2f}",
            result.num_branched,
            result.num_events,
        )
        print(markdown_row(cells) + ("" if holds else " WRONG"), flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    main()
