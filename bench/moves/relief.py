"""What moving running requests is worth: real engines with few pages, and the same requests with moves off and on in turn.

    python -m bench.moves.relief                              both loads: with skew and even, each round once in each mode
    python -m bench.moves.relief --loads skewed
    python -m bench.moves.relief --loads even --rounds 60

Two routers have a link to every group, one with mode Off and one with mode Migrate; each gets the load in its rounds. Each engine
has one processor, as a pod with such a limit has it: with a thread for each processor they would wait for one another's threads.
It gives way to routers and clients, who have processors of their own elsewhere. The model is large enough for requests to live
for seconds: a request is offered once a second, and a group that it left is barred for ten.

With skew lengths of outputs are log-normal, and the first group also serves clients of its own, of whom no router knows; alone
they always fit. An even load is of equal requests from clients that begin one after the other; the first of each does not count:
groups are empty then.
Shown: preemptions of the engines, the longest gap of each stream, times to the first token and between tokens, moves by why and
how they ended. What is judged: `bench.moves.relief_claims`. Exits 1 when a request failed, or something judged is not so.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.programs import Program, running
from bench.moves.relief_claims import MODES, Played, Round, joined, judge, show

LOADS = ("skewed", "even")
PROMPT_TOKENS, MEDIAN_OUTPUT, SPREAD = 64, 150.0, 1.0
LONGEST_OUTPUT = 800
EVEN_OUTPUT = 128
BEGIN_S = 2.0
"""Clients of an even load begin within so many seconds, about as long as a request takes, and not all at once."""
CONTEXT = 2048
PAGES_BYTES = 13_200_000
"""201 pages of 16 tokens; the longest request fills 54 of them."""
YIELDING = 10
"""By how much engines are nicer than routers and clients."""
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:{[^}]*})? (\S+)$", re.M)
MOVES = re.compile(r'^phalanx_router_moves_total{outcome="(\w+)",why="(\w+)"} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, and a router for each mode."""

    engines: list[Program]
    routers: dict[str, Program]


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


async def even_load(session: aiohttp.ClientSession, url: str, todo: Sequence[dict[str, object]], clients: int) -> list[Answer]:
    """The answers to these requests but for each client's first, unless that failed. Clients begin one after the other."""

    async def client(number: int) -> list[Answer]:
        await asyncio.sleep(BEGIN_S * number / clients)
        first, *others = [await stream_answer(session, f"{url}/v1/completions", body) for body in todo[number::clients]]
        return others if first.error is None else [first, *others]

    return [answer for answers in await asyncio.gather(*map(client, range(clients))) for answer in answers]


async def skewed_load(args: argparse.Namespace, session: aiohttp.ClientSession, url: str, first: str, seed: int) -> list[Answer]:
    """The answers to as many requests as asked for, beside those that the first engine has of its own; of these what failed."""
    own = iter(bodies(seed + 1000, args.own_requests, even=False))
    answers, others = await asyncio.gather(
        load(session, url, iter(bodies(seed, args.requests, even=False)), args.clients),
        load(session, first, own, args.own_clients),
    )
    return answers + [answer for answer in others if answer.error is not None]


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


async def play(args: argparse.Namespace, fleet: Fleet, mode: str, seed: int, even: bool) -> Round:
    """One round, until all requests have ended."""
    router = fleet.routers[mode]
    async with session_for(4 * args.clients, None, args.timeout_s) as session:
        before, moved = await preemptions(session, fleet), await moves(session, router)
        if even:
            answers = await even_load(session, router.base_url, bodies(seed, args.requests, even), args.clients)
        else:
            answers = await skewed_load(args, session, router.base_url, fleet.engines[0].base_url, seed)
        seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
        after, then = await preemptions(session, fleet), await moves(session, router)
        return Round(answers, seconds, after - before, {why: n - moved.get(why, 0.0) for why, n in then.items()})


@contextmanager
def running_fleet(args: argparse.Namespace, folder: Path) -> Iterator[Fleet]:
    """Engines with few pages and both routers, ready."""
    token = folder / "token"
    token.write_text("of the bench")
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
    flags += ["--max-num-seqs", "32", "--max-num-batched-tokens", "256"]
    model = str(args.model or small(folder / "small"))
    processors = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        engines = []
        for number in range(args.groups):
            held = ["nice", "-n", str(YIELDING), "taskset", "-c", str(processors[number % len(processors)])]
            given = ["serve", model, *flags]
            engines.append(stack.enter_context(running(f"engine-{number}", "phalanx_runtime", given, folder, before=held)))
        leaders = ",".join(engine.base_url.removeprefix("http://") for engine in engines)
        routers = {}
        for mode in MODES:
            policy = folder / f"{mode}.json"
            policy.write_text(json.dumps({"mode": mode}))
            given = ["serve", "--leaders", leaders, "--token-file", str(token), "--policy-file", str(policy)]
            routers[mode] = stack.enter_context(running(f"router-{mode}", "phalanx_router", given, folder))
        yield Fleet(engines, routers)


def small(folder: Path) -> Path:
    """A random model of 12 million weights that keeps 4 KiB for each token."""
    from tests.runtime.tiny import save_tiny

    wide = partial(save_tiny, hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64)
    return wide(folder, num_hidden_layers=4, max_position_embeddings=CONTEXT)


async def until_served(fleet: Fleet) -> None:
    """Returns once each router serves a request: its links are up and it knows the tokenizer."""
    body = bodies(1, 1, even=True)[0]
    async with session_for(4, None, 60) as session:
        for router in fleet.routers.values():
            while (await stream_answer(session, f"{router.base_url}/v1/completions", body)).error is not None:
                await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, Played]:
    """All rounds, by load and mode; who begins changes from round to round. Two rounds before them count nothing."""
    await until_served(fleet)
    for mode in MODES:
        await play(args, fleet, mode, args.seed, even=True)
    played: dict[str, Played] = {load: {mode: [] for mode in MODES} for load in args.loads}
    for load in args.loads:
        for number in range(args.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                played[load][mode].append(await play(args, fleet, mode, args.seed + number, load == "even"))
                print(f"{load} round {number}, {mode}: {played[load][mode][-1].figures()}", file=sys.stderr, flush=True)
    return played


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.moves.relief", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", type=Path, help="a model folder (default: a small random one)")
    made.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    made.add_argument("--groups", type=int, default=4)
    made.add_argument("--rounds", type=int, default=20, help="of each load in each mode")
    made.add_argument("--requests", type=int, default=160, help="requests of a round")
    made.add_argument("--clients", type=int, default=36, help="requests of a round that run at once")
    made.add_argument("--own-clients", type=int, default=3, help="clients of the first engine itself, in skewed rounds")
    made.add_argument("--own-requests", type=int, default=20, help="their requests in a round")
    made.add_argument("--kv-cache-memory-bytes", type=int, default=PAGES_BYTES, help="of each engine")
    made.add_argument("--timeout-s", type=float, default=120.0, help="a request that takes longer has failed")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, default=None)
    return made


def main() -> int:
    """Runs all; 1 when a request failed, or a claim does not hold. 2 for a command line that makes no sense."""
    args = parser().parse_args()
    if "even" in args.loads and args.requests < 2 * args.clients:
        parser().error("an even load takes two requests a client or more (--requests, --clients): the first does not count")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines and routers end with this program
    with tempfile.TemporaryDirectory() as folder, running_fleet(args, Path(folder)) as fleet:
        played = asyncio.run(measure(args, fleet))
    claims = {load: judge(load, rounds) for load, rounds in played.items()}
    for load, rounds in played.items():
        show(load, rounds, claims[load])
    print(f"load average of the machine: {os.getloadavg()[2]:.1f} over the last 15 minutes")
    if args.json is not None:
        args.json.write_text(
            json.dumps({load: {m: joined(r[m]).figures() for m in MODES} for load, r in played.items()}, indent=2)
        )
    failed = any(joined(rounds[mode]).figures()["failed"] for rounds in played.values() for mode in MODES)
    return 1 if failed or any(claim.is_met is False for one in claims.values() for claim in one) else 0


if __name__ == "__main__":
    sys.exit(main())
