"""Forced moves at random indexes, by a real router over real engines: no index is missing or doubled, tokens are equal.

    python -m bench.moves.through_router [MODEL] [--moves 10000] [--groups 2] [--streams 8] [--dtype float64] [--json FILE]

A router in this process has a link to each engine. Greedy and seeded streams, streams with a JSON schema and siblings (n = 2) run
once undisturbed; then again and again, while each is moved after every few tokens to another group, stopped or copied ahead or
without its pages, until so many moves are done. Exits 1 when a token differs, a stream is lost, or a page is left in the end.
Without a model it is a tiny random one; float64 leaves no near-ties.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.frame.figures import percentile
from bench.frame.programs import Program, running
from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_api.wire.router import mix
from phalanx_frontend.backend import Delta
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.records import MoveEnded, MoveRequest, TransferMode
from phalanx_router.session import FleetSettings, StreamSession

TOKEN = "of the bench"
PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT = 60, 300, 2048
MEAN_STAY = 8
"""Tokens that a stream draws in a group, in the mean."""
HOWS: tuple[TransferMode, ...] = ("stop", "precopy", "stop", "precopy", "recompute")
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":200}},"required":["a","b"]}'
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "seeded": [{"temperature": 1.0}],
    "schema": [{"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)}],
    "n = 2": [{"temperature": 1.0, "seed": mix(7, choice)} for choice in range(2)],
}
AT_REST_S = 15.0
Asked = tuple[str, wire.Request]
"""A request and its kind."""


@dataclass(slots=True)
class Report:
    """What came of it. `wrong`: one sentence for each thing that must not be."""

    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    stalls_s: list[float] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    streams: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, object]:
        """For people and for --json."""
        return {
            "streams": self.streams,
            "tokens": self.tokens,
            "moves by end": dict(self.ends),
            "moved by kind": dict(self.moved),
            "stall p50, ms": round(1e3 * percentile(self.stalls_s, 50), 1) if self.stalls_s else None,
            "stall p99, ms": round(1e3 * percentile(self.stalls_s, 99), 1) if self.stalls_s else None,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 1),
            "wrong": self.wrong[:20],
        }


def make_requests(rounds: int, seed: int) -> list[Asked]:
    """Requests with their kind; siblings share a prompt."""
    chance, made = random.Random(seed), []
    for number in range(rounds):
        for kind, samplings in KINDS.items():
            prompt = [chance.randrange(256) for _ in range(PROMPT_TOKENS)]
            for choice, sampling in enumerate(samplings):
                asked = wire.Sampling(**{"max_tokens": OUTPUT_TOKENS, "seed": 7 + number, **sampling})
                made.append(
                    (kind, wire.Request(id=f"{kind} {number} {choice}", epoch=0, prompt=prompt, delivered=[], sampling=asked))
                )
    return made


class Bench:
    """A router with links to engines, and streams that it moves."""

    def __init__(self, fleet: RouterBackend, seed: int) -> None:
        self.report = Report()
        self._fleet = fleet
        self._chance = random.Random(seed)
        self._kinds: dict[str, str] = {}
        fleet.mover.ended.append(self._move_ended)

    async def plain(self, requests: Sequence[Asked], at_once: int) -> dict[str, list[int]]:
        """The tokens of each, without a move."""
        limit = asyncio.Semaphore(at_once)

        async def one(request: wire.Request) -> list[int]:
            async with limit:
                return await self._hear(request, moves=False)

        answers = await asyncio.gather(*(one(request) for _, request in requests))
        return {request.id: tokens for (_, request), tokens in zip(requests, answers, strict=True)}

    async def run(
        self, requests: Sequence[tuple[str, wire.Request]], plain: dict[str, list[int]], count: int, at_once: int
    ) -> None:
        """Moves streams of these until so many moves succeeded."""
        began, number = time.perf_counter(), 0

        async def client() -> None:
            nonlocal number
            while self.report.ends["moved"] < count and len(self.report.wrong) < 20:
                kind, request = requests[number % len(requests)]
                number += 1
                asked = wire.Request(
                    id=f"{request.id} #{number}", epoch=0, prompt=request.prompt, delivered=[], sampling=request.sampling
                )
                self._kinds[asked.id] = kind
                got = await self._hear(asked, moves=True)
                self.report.streams += 1
                self.report.tokens += len(got)
                if got != plain[request.id]:
                    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, plain[request.id], strict=False)))
                    self.report.wrong.append(f"{asked.id}: {len(got)} tokens, differs at {same} of {len(plain[request.id])}")

        await asyncio.gather(*(client() for _ in range(at_once)))
        self.report.seconds = time.perf_counter() - began

    async def rest(self) -> None:
        """Waits until every engine says that it has nothing in hand, and all pages are free."""
        links = self._fleet.links.eligible(self._fleet.links.tokenizer()).values()
        deadline = time.perf_counter() + AT_REST_S
        for link in links:
            while (load := link.group_report.load) is None or load.running or load.waiting or load.free_pages < load.total_pages:
                if time.perf_counter() > deadline:
                    self.report.wrong.append(f"{link.endpoint.group} does not come to rest: {load}")
                    return
                await asyncio.sleep(0.1)
            if load.leaks:
                self.report.wrong.append(f"{link.endpoint.group} has {load.leaks} leaks")

    async def _hear(self, request: wire.Request, moves: bool) -> list[int]:
        got: list[int] = []
        run: StreamSession | None = None
        move_at = self._next(0)
        async for item in self._fleet.generate(request):
            if not isinstance(item, Delta):
                continue
            if item.index != len(got):
                self.report.wrong.append(f"{request.id}: index {item.index} after {len(got)} tokens")
            got += item.tokens
            if moves and len(got) >= move_at:
                run = run or next(run for run in self._fleet.runs if run.stream.journal.replay().id == request.id)
                if not run.move and not run.stream.journal.is_fresh:
                    self._move(run)
                    move_at = self._next(len(got))
        if moves and run is not None and (run.losses or run.moves):
            self.report.wrong.append(f"{request.id} lost its group {run.losses} times")
        return got

    def _next(self, index: int) -> int:
        return index + 1 + int(self._chance.expovariate(1 / MEAN_STAY))

    def _move(self, run: StreamSession) -> None:
        links = self._fleet.links.eligible(run.tokenizer)
        target = self._chance.choice([key for key in links if key != run.group])
        declined = self._fleet.mover.move(run, target, self._chance.choice(HOWS), "asked")
        if declined is not None:
            self.report.ends[f"declined: {declined}"] += 1

    def _move_ended(self, run: StreamSession, proposal: MoveRequest, over: MoveEnded) -> None:
        is_moved = over.outcome == "moved"
        self.report.ends["moved" if is_moved else f"{over.outcome}: {over.code}"] += 1
        self.report.num_bytes += over.num_bytes
        if not self.report.ends.total() % 1000:
            print(f"{dict(self.report.ends)}, {len(self.report.wrong)} wrong", file=sys.stderr, flush=True)
        if is_moved:
            self.report.moved[f"{self._kinds[run.stream.journal.replay().id]}, {proposal.how}"] += 1
        if over.stall_s is not None:
            self.report.stalls_s.append(over.stall_s)


@contextmanager
def engines(model: Path, count: int, dtype: str, folder: Path) -> Iterator[list[Program]]:
    """So many engines of this model."""
    token = folder / "token"
    token.write_text(TOKEN)
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", "16000000", "--dtype", dtype, "--max-num-seqs", "16"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(f"engine-{number}", "phalanx_runtime", ["serve", str(model), *flags], folder))
            for number in range(count)
        ]


async def bench(addresses: Sequence[str], count: int, at_once: int, rounds: int, seed: int) -> Report:
    """The report of one run over engines that serve there."""
    settings = FleetSettings(link=LinkSettings(token=TOKEN, router="bench"), policy=BalancePolicy(mode="Off"))
    fleet = RouterBackend(settings, RouterMetrics(CollectorRegistry()))
    task = asyncio.create_task(fleet.run(StaticLeaders(addresses)))
    try:
        while fleet.links.num_ready < len(addresses):
            await asyncio.sleep(0.05)
        made, requests = Bench(fleet, seed), make_requests(rounds, seed)
        plain = await made.plain(requests, at_once)
        await made.run(requests, plain, count, at_once)
        await made.rest()
        return made.report
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when anything was wrong."""
    asked = argparse.ArgumentParser(prog="python -m bench.moves.through_router", description=(__doc__ or "").splitlines()[0])
    asked.add_argument("model", type=Path, nargs="?", help="a model folder (default: a tiny random one)")
    asked.add_argument("--moves", type=int, default=10_000)
    asked.add_argument("--groups", type=int, default=2)
    asked.add_argument("--streams", type=int, default=8, help="at once")
    asked.add_argument("--rounds", type=int, default=4, help="different requests of each kind")
    asked.add_argument("--dtype", default="float64")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--json", type=Path, default=None, help="write the figures here too")
    args = asked.parse_args(argv)
    from tests.runtime.tiny import save_tiny

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or save_tiny(folder / "tiny", max_position_embeddings=CONTEXT)
        programs = stack.enter_context(engines(model, args.groups, args.dtype, folder))
        addresses = [program.base_url.removeprefix("http://") for program in programs]
        report = asyncio.run(bench(addresses, args.moves, args.streams, args.rounds, args.seed))
    for name, value in report.figures().items():
        print(f"{name:16} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.figures(), indent=2))
    return 1 if report.wrong or report.ends["moved"] < args.moves else 0


if __name__ == "__main__":
    sys.exit(main())
