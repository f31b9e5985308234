"""What moving running requests is worth: real engines with few pages, and the same requests with moves off and on in turn.

    python -m bench.relief MODEL --groups 4 --rounds 3            skewed: the first group also serves clients of its own
    python -m bench.relief MODEL --groups 4 --rounds 3 --even     all groups are loaded alike, with equal requests

Two routers have a link to every group, one with mode Off and one with mode Migrate; each gets the load in its rounds. Lengths of
outputs are log-normal, so groups fill unequally. Shown, as means over the rounds: preemptions of the engines, the longest gap of
each stream, times to the first token and between tokens, and moves by why and how they ended. A tiny model with a long context
does, for instance that of `tests.runtime.tiny`. Exits 1 when a request failed.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.client import Answer, session_for, stream_answer
from bench.figures import percentile, table
from bench.programs import Program, running

MODES = ("Off", "Migrate")
PROMPT_TOKENS, MEDIAN_OUTPUT, SPREAD = 64, 150.0, 1.0
LONGEST_OUTPUT = 800
EVEN_OUTPUT = 128
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:{[^}]*})? (\S+)$", re.M)
MOVES = re.compile(r'^phalanx_router_moves_total{outcome="(\w+)",why="(\w+)"} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, and a router for each mode."""

    engines: list[Program]
    routers: dict[str, Program]


@dataclass(frozen=True, slots=True)
class Round:
    """What one mode did with one set of requests."""

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
            "preemptions": self.preemptions,
            "longest gap p99, ms": 1e3 * percentile([max(answer.gaps_s, default=0.0) for answer in whole], 99),
            "ttft p99, ms": 1e3 * percentile([answer.ttft_s for answer in whole], 99),
            "tpot p99, ms": 1e3 * percentile(tpots, 99),
            "tokens/s": sum(answer.completion_tokens for answer in whole) / self.seconds,
        } | {f"moves {why}": count for why, count in sorted(self.moves.items())}


def bodies(seed: int, count: int, even: bool) -> list[dict[str, object]]:
    """Requests of one round; all prompts differ."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for _ in range(count):
        drawn = min(LONGEST_OUTPUT, max(16, int(rng.lognormvariate(0, SPREAD) * MEDIAN_OUTPUT)))
        prompt = [rng.randrange(256) for _ in range(PROMPT_TOKENS)]
        made.append(
            {"prompt": prompt, "max_tokens": EVEN_OUTPUT if even else drawn, "temperature": 0, "ignore_eos": True, "stream": True}
            | {"stream_options": {"include_usage": True}}
        )
    return made


async def load(session: aiohttp.ClientSession, url: str, todo: Iterator[dict[str, object]], clients: int) -> list[Answer]:
    """The answers to these requests, so many at once."""
    answers: list[Answer] = []

    async def client() -> None:
        for body in todo:
            answers.append(await stream_answer(session, f"{url}/v1/completions", body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def scrape(session: aiohttp.ClientSession, program: Program) -> str:
    async with session.get(f"{program.base_url}/metrics") as response:
        return await response.text()


async def preemptions(session: aiohttp.ClientSession, fleet: Fleet) -> float:
    """Of all engines since their start."""
    texts = [await scrape(session, engine) for engine in fleet.engines]
    return sum(float(count) for text in texts for count in PREEMPTIONS.findall(text))


async def moves(session: aiohttp.ClientSession, router: Program) -> dict[str, float]:
    """Moves of a router since its start, by why and how they ended."""
    return {f"{why} {outcome}": float(count) for outcome, why, count in MOVES.findall(await scrape(session, router))}


async def play(args: argparse.Namespace, fleet: Fleet, mode: str, seed: int) -> Round:
    """One round. In a skewed one the first engine has clients of its own until the router's are done."""
    router, count = fleet.routers[mode], args.requests
    async with session_for(4 * args.clients, None, 600) as session:
        before, moved = await preemptions(session, fleet), await moves(session, router)
        own = iter(bodies(seed + 1000, 10 * count, even=False))
        side = [] if args.even else [asyncio.create_task(load(session, fleet.engines[0].base_url, own, args.own_clients))]
        started = time.perf_counter()
        answers = await load(session, router.base_url, iter(bodies(seed, count, args.even)), args.clients)
        seconds = time.perf_counter() - started
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)
        after, then = await preemptions(session, fleet), await moves(session, router)
        return Round(answers, seconds, after - before, {why: n - moved.get(why, 0.0) for why, n in then.items()})


@contextmanager
def running_fleet(args: argparse.Namespace, folder: Path) -> Iterator[Fleet]:
    """Engines with few pages and both routers, ready."""
    token = folder / "token"
    token.write_text("of the bench")
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
    flags += ["--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching"]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(running(f"engine-{number}", "phalanx_runtime", ["serve", args.model, *flags], folder))
            for number in range(args.groups)
        ]
        leaders = ",".join(engine.base_url.removeprefix("http://") for engine in engines)
        routers = {}
        for mode in MODES:
            policy = folder / f"{mode}.json"
            policy.write_text(json.dumps({"mode": mode}))
            given = ["serve", "--leaders", leaders, "--token-file", str(token), "--policy-file", str(policy)]
            routers[mode] = stack.enter_context(running(f"router-{mode}", "phalanx_router", given, folder))
        yield Fleet(engines, routers)


async def until_served(fleet: Fleet) -> None:
    """Returns once each router serves a request: its links are up and it knows the tokenizer."""
    body = bodies(1, 1, even=True)[0]
    async with session_for(4, None, 60) as session:
        for router in fleet.routers.values():
            while (await stream_answer(session, f"{router.base_url}/v1/completions", body)).error is not None:
                await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, list[Round]]:
    """All rounds, by mode; who begins changes from round to round."""
    await until_served(fleet)
    played: dict[str, list[Round]] = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            played[mode].append(await play(args, fleet, mode, number))
            print(f"round {number}, {mode}: {played[mode][-1].figures()}", file=sys.stderr)
    return played


def summed(played: dict[str, list[Round]]) -> dict[str, dict[str, float]]:
    """Means over the rounds, by mode."""
    return {
        mode: {
            name: statistics.fmean(one.figures().get(name, 0.0) for one in rounds)
            for name in dict.fromkeys(name for one in rounds for name in one.figures())
        }
        for mode, rounds in played.items()
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.relief", description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", help="a model folder")
    made.add_argument("--groups", type=int, default=4)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--requests", type=int, default=120, help="requests of a round")
    made.add_argument("--clients", type=int, default=32, help="requests of a round that run at once")
    made.add_argument("--own-clients", type=int, default=6, help="clients of the first engine itself, in skewed rounds")
    made.add_argument("--kv-cache-memory-bytes", type=int, default=2_000_000, help="of each engine")
    made.add_argument("--even", action="store_true", help="equal requests, and no clients of one engine")
    made.add_argument("--json", type=Path, default=None)
    return made


def main() -> int:
    """Runs all; 1 when a request failed."""
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder, running_fleet(args, Path(folder)) as fleet:
        figures = summed(asyncio.run(measure(args, fleet)))
    names = list(dict.fromkeys(name for mode in MODES for name in figures[mode]))
    print(table(["", *MODES], [[name, *(f"{figures[mode].get(name, 0.0):.1f}" for mode in MODES)] for name in names]))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))
    return 1 if any(one["failed"] for one in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
