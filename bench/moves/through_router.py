"""Checks forced moves at random indexes by a real router over real engines: no missing or doubled index, equal tokens.

    python -m bench.moves.through_router [MODEL] [--moves 10000] [--groups 2] [--streams 8] [--dtype float64] [--json FILE]

Greedy streams, seeded ones, streams with a JSON schema and siblings (n = 2) run once without moves, then repeatedly while each
moves to another group every few tokens: stop and copy, pre-copy, or recomputed from the journal. Exits with 1 if a token differs,
a stream is lost or a page is not freed. The default model is a tiny random one; float64 avoids near-ties.
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
from phalanx_api.wire.router import choice_seed
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import Delta
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_router.moves.records import MoveEnded, MoveRequest, TransferMode
from phalanx_router.session import FleetSettings, StreamSession

TOKEN = "of the bench"
PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT = 60, 300, 2048
MEAN_STAY = 8
"""Mean number of tokens between moves of a stream."""
MODES: tuple[TransferMode, ...] = ("stop", "precopy", "stop", "precopy", "recompute")
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":200}},"required":["a","b"]}'
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "seeded": [{"temperature": 1.0}],
    "schema": [{"temperature": 1.0, "grammar": wire.Grammar("json_schema", SCHEMA)}],
    "n = 2": [{"temperature": 1.0, "seed": choice_seed(7, choice)} for choice in range(2)],
}
IDLE_TIMEOUT_S = 15.0
KindedRequest = tuple[str, wire.Request]
"""A kind and a request of it."""


@dataclass(slots=True)
class Report:
    violations: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    stalls_s: list[float] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    streams: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, object]:
        return {
            "streams": self.streams,
            "tokens": self.tokens,
            "moves by end": dict(self.ends),
            "moved by kind": dict(self.moved),
            "stall p50, ms": round(1e3 * percentile(self.stalls_s, 50), 1) if self.stalls_s else None,
            "stall p99, ms": round(1e3 * percentile(self.stalls_s, 99), 1) if self.stalls_s else None,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 1),
            "violations": self.violations[:20],
        }


def make_requests(rounds: int, seed: int) -> list[KindedRequest]:
    """Returns requests with their kinds; siblings share a prompt."""
    rng, requests = random.Random(seed), []
    for number in range(rounds):
        for kind, samplings in KINDS.items():
            prompt = [rng.randrange(256) for _ in range(PROMPT_TOKENS)]
            for choice, sampling in enumerate(samplings):
                params = wire.Sampling(**{"max_tokens": OUTPUT_TOKENS, "seed": 7 + number, **sampling})
                requests.append(
                    (kind, wire.Request(id=f"{kind} {number} {choice}", epoch=0, prompt=prompt, delivered=[], sampling=params))
                )
    return requests


class Bench:
    """A router with links to engines, and the streams that it moves."""

    def __init__(self, fleet: RouterBackend, seed: int) -> None:
        self.report = Report()
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._kinds: dict[str, str] = {}
        fleet.mover.end_listeners.append(self._move_ended)

    async def plain(self, requests: Sequence[KindedRequest], concurrency: int) -> dict[str, list[int]]:
        limit = asyncio.Semaphore(concurrency)

        async def run_one(request: wire.Request) -> list[int]:
            async with limit:
                return await self._read(request, is_moved=False)

        answers = await asyncio.gather(*(run_one(request) for _, request in requests))
        return {request.id: tokens for (_, request), tokens in zip(requests, answers, strict=True)}

    async def run(
        self, requests: Sequence[tuple[str, wire.Request]], plain: dict[str, list[int]], count: int, concurrency: int
    ) -> None:
        """Moves streams of these requests until `count` moves succeeded."""
        started, number = time.perf_counter(), 0

        async def client() -> None:
            nonlocal number
            while self.report.ends["moved"] < count and len(self.report.violations) < 20:
                kind, request = requests[number % len(requests)]
                number += 1
                renamed = wire.Request(
                    id=f"{request.id} #{number}", epoch=0, prompt=request.prompt, delivered=[], sampling=request.sampling
                )
                self._kinds[renamed.id] = kind
                tokens = await self._read(renamed, is_moved=True)
                self.report.streams += 1
                self.report.tokens += len(tokens)
                if tokens != plain[request.id]:
                    num_equal = sum(
                        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, plain[request.id], strict=False))
                    )
                    self.report.violations.append(
                        f"{renamed.id}: {len(tokens)} tokens, differs at {num_equal} of {len(plain[request.id])}"
                    )

        await asyncio.gather(*(client() for _ in range(concurrency)))
        self.report.seconds = time.perf_counter() - started

    async def wait_until_idle(self) -> None:
        """Waits until every engine reports itself idle with all pages free."""
        links = self._fleet.links.eligible(self._fleet.links.tokenizer()).values()
        deadline = time.perf_counter() + IDLE_TIMEOUT_S
        for link in links:
            while (load := link.group_report.load) is None or load.running or load.waiting or load.free_pages < load.total_pages:
                if time.perf_counter() > deadline:
                    self.report.violations.append(f"{link.endpoint.group} is not idle: {load}")
                    return
                await asyncio.sleep(0.1)
            if load.leaks:
                self.report.violations.append(f"{link.endpoint.group} has {load.leaks} leaks")

    async def _read(self, request: wire.Request, is_moved: bool) -> list[int]:
        tokens: list[int] = []
        run: StreamSession | None = None
        move_at = self._next_move(0)
        async for item in self._fleet.generate(request):
            if not isinstance(item, Delta):
                continue
            if item.index != len(tokens):
                self.report.violations.append(f"{request.id}: index {item.index} after {len(tokens)} tokens")
            tokens += item.tokens
            if is_moved and len(tokens) >= move_at:
                run = run or next(run for run in self._fleet.sessions if run.stream.journal.replay().id == request.id)
                if not run.moves.open_move and not run.stream.journal.is_fresh:
                    self._move(run)
                    move_at = self._next_move(len(tokens))
        if is_moved and run is not None and run.failures.num_departures:
            self.report.violations.append(f"{request.id} lost its group {run.failures.num_losses} times")
        return tokens

    def _next_move(self, index: int) -> int:
        return index + 1 + int(self._rng.expovariate(1 / MEAN_STAY))

    def _move(self, run: StreamSession) -> None:
        links = self._fleet.links.eligible(run.tokenizer)
        target = self._rng.choice([key for key in links if key != run.last_key])
        declined = self._fleet.mover.move(run, target, self._rng.choice(MODES), "manual")
        if declined is not None:
            self.report.ends[f"declined: {declined}"] += 1

    def _move_ended(self, run: StreamSession, planned: MoveRequest, ended: MoveEnded) -> None:
        is_moved = ended.outcome == "moved"
        self.report.ends["moved" if is_moved else f"{ended.outcome}: {ended.code}"] += 1
        self.report.num_bytes += ended.num_bytes
        if not self.report.ends.total() % 1000:
            print(f"{dict(self.report.ends)}, {len(self.report.violations)} violations", file=sys.stderr, flush=True)
        if is_moved:
            self.report.moved[f"{self._kinds[run.stream.journal.replay().id]}, {planned.transfer}"] += 1
        if ended.stall_s is not None:
            self.report.stalls_s.append(ended.stall_s)


@contextmanager
def engines(model: Path, count: int, dtype: str, folder: Path, more: Sequence[str] = ()) -> Iterator[list[Program]]:
    """Runs `count` engines of this model, with `more` flags, until the block ends."""
    token = folder / "token"
    token.write_text(TOKEN)
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", "16000000", "--dtype", dtype, "--max-num-seqs", "16"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(f"engine-{number}", "phalanx_runtime", ["serve", str(model), *flags, *more], folder))
            for number in range(count)
        ]


async def run_bench(addresses: Sequence[str], count: int, concurrency: int, rounds: int, seed: int) -> Report:
    settings = FleetSettings(link=LinkSettings(token=ServiceToken([TOKEN]), router="bench"), policy=BalancePolicy(mode="Off"))
    fleet = RouterBackend(settings, RouterMetrics(CollectorRegistry()))
    task = asyncio.create_task(fleet.run(StaticLeaders(addresses)))
    try:
        while fleet.links.num_ready < len(addresses):
            await asyncio.sleep(0.05)
        bench, requests = Bench(fleet, seed), make_requests(rounds, seed)
        plain = await bench.plain(requests, concurrency)
        await bench.run(requests, plain, count, concurrency)
        await bench.wait_until_idle()
        return bench.report
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m bench.moves.through_router", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("model", type=Path, nargs="?", help="a model folder (default: a tiny random one)")
    flags.add_argument("--moves", type=int, default=10_000)
    flags.add_argument("--groups", type=int, default=2)
    flags.add_argument("--streams", type=int, default=8, help="concurrent streams")
    flags.add_argument("--rounds", type=int, default=4, help="different requests of each kind")
    flags.add_argument("--dtype", default="float64")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, default=None, help="file for the figures as JSON")
    args = flags.parse_args(argv)
    from tests.runtime.tiny import save_tiny

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or save_tiny(folder / "tiny", max_position_embeddings=CONTEXT)
        programs = stack.enter_context(engines(model, args.groups, args.dtype, folder))
        addresses = [program.base_url.removeprefix("http://") for program in programs]
        report = asyncio.run(run_bench(addresses, args.moves, args.streams, args.rounds, args.seed))
    for name, value in report.figures().items():
        print(f"{name:16} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(report.figures(), indent=2))
    return 1 if report.violations or report.ends["moved"] < args.moves else 0


if __name__ == "__main__":
    sys.exit(main())
