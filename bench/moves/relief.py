"""Measures the gain of moving running requests: real engines with few pages, moves off and on in turn.

    python -m bench.moves.relief                              both loads
    python -m bench.moves.relief --loads skewed
    python -m bench.moves.relief --loads even --rounds 60

Two routers have links to all groups, one with mode Off and one with mode Migrate; each plays every round. Each engine is pinned
to one core, like a pod with that limit, and has a lower priority than routers and clients, which have cores of their own in a
cluster. The model is large enough that requests run for seconds: a request is offered once per second, and a group that it left
is barred for ten.

- skewed: output lengths are log-normal, and the first group also serves clients of its own, which the routers do not count. They
  alone always fit.
- even: equal requests from clients that start one after another. The first request of each client does not count, because groups
  are empty then.

Prints preemptions, the longest gap of each stream, TTFT, TPOT, tokens/s, and moves by cause and outcome.
`bench.moves.relief_claims` states the bounds. Exits with 1 if a request fails or a bound is missed.
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
from bench.moves.relief_claims import MODES, Played, Round, judge, merged, print_tables

LOADS = ("skewed", "even")
PROMPT_TOKENS, MEDIAN_OUTPUT, SPREAD = 64, 150.0, 1.0
LONGEST_OUTPUT = 800
EVEN_OUTPUT = 128
START_SPREAD_S = 2.0
"""Seconds within which the clients of an even load start, about the duration of a request."""
CONTEXT = 2048
PAGES_BYTES = 13_200_000
"""201 pages of 16 tokens; the longest request fills 54 of them."""
NICENESS = 10
"""Niceness of engines relative to routers and clients."""
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:{[^}]*})? (\S+)$", re.M)
MOVES = re.compile(r'^phalanx_router_moves_total{outcome="(\w+)",why="(\w+)"} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Fleet:
    engines: list[Program]
    routers: dict[str, Program]


def bodies(seed: int, count: int, even: bool) -> list[dict[str, object]]:
    """Returns the requests of one round; all prompts differ."""
    rng = random.Random(seed)
    requests: list[dict[str, object]] = []
    for _ in range(count):
        drawn = min(LONGEST_OUTPUT, max(16, int(rng.lognormvariate(0, SPREAD) * MEDIAN_OUTPUT)))
        prompt = [rng.randrange(256) for _ in range(PROMPT_TOKENS)]
        requests.append(
            {"prompt": prompt, "max_tokens": EVEN_OUTPUT if even else drawn, "temperature": 0, "ignore_eos": True, "stream": True}
            | {"stream_options": {"include_usage": True}}
        )
    return requests


async def load(session: aiohttp.ClientSession, url: str, requests: Iterator[dict[str, object]], clients: int) -> list[Answer]:
    answers: list[Answer] = []

    async def client() -> None:
        for body in requests:
            answers.append(await stream_answer(session, f"{url}/v1/completions", body))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def even_load(
    session: aiohttp.ClientSession, url: str, requests: Sequence[dict[str, object]], clients: int
) -> list[Answer]:
    """Sends these requests from clients that start one after another; drops each client's first answer, unless it failed."""

    async def client(number: int) -> list[Answer]:
        await asyncio.sleep(START_SPREAD_S * number / clients)
        first, *others = [await stream_answer(session, f"{url}/v1/completions", body) for body in requests[number::clients]]
        return others if first.error is None else [first, *others]

    return [answer for answers in await asyncio.gather(*map(client, range(clients))) for answer in answers]


async def skewed_load(args: argparse.Namespace, session: aiohttp.ClientSession, url: str, first: str, seed: int) -> list[Answer]:
    """Sends the requests of a round while the first engine serves its own; returns their answers and failures of the latter."""
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
    texts = [await scrape(session, engine) for engine in fleet.engines]
    return sum(float(count) for text in texts for count in PREEMPTIONS.findall(text))


async def moves(session: aiohttp.ClientSession, router: Program) -> dict[str, float]:
    """Returns a router's moves since its start, by cause and outcome."""
    return {f"{why} {outcome}": float(count) for outcome, why, count in MOVES.findall(await scrape(session, router))}


async def play(args: argparse.Namespace, fleet: Fleet, mode: str, seed: int, even: bool) -> Round:
    router = fleet.routers[mode]
    async with session_for(4 * args.clients, None, args.timeout_s) as session:
        preemptions_before, moves_before = await preemptions(session, fleet), await moves(session, router)
        if even:
            answers = await even_load(session, router.base_url, bodies(seed, args.requests, even), args.clients)
        else:
            answers = await skewed_load(args, session, router.base_url, fleet.engines[0].base_url, seed)
        seconds = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
        preemptions_after, moves_after = await preemptions(session, fleet), await moves(session, router)
        made_moves = {why: count - moves_before.get(why, 0.0) for why, count in moves_after.items()}
        return Round(answers, seconds, preemptions_after - preemptions_before, made_moves)


@contextmanager
def running_fleet(args: argparse.Namespace, folder: Path) -> Iterator[Fleet]:
    """Runs engines with few pages and both routers until the block ends."""
    token = folder / "token"
    token.write_text("of the bench")
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
    flags += ["--max-num-seqs", "32", "--max-num-batched-tokens", "256"]
    model = str(args.model or save_small(folder / "small"))
    processors = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        engines = []
        for number in range(args.groups):
            prefix = ["nice", "-n", str(NICENESS), "taskset", "-c", str(processors[number % len(processors)])]
            arguments = ["serve", model, *flags]
            engines.append(stack.enter_context(running(f"engine-{number}", "phalanx_runtime", arguments, folder, before=prefix)))
        leaders = ",".join(engine.base_url.removeprefix("http://") for engine in engines)
        routers = {}
        for mode in MODES:
            policy = folder / f"{mode}.json"
            policy.write_text(json.dumps({"mode": mode}))
            arguments = ["serve", "--leaders", leaders, "--token-file", str(token), "--policy-file", str(policy)]
            routers[mode] = stack.enter_context(running(f"router-{mode}", "phalanx_router", arguments, folder))
        yield Fleet(engines, routers)


def save_small(folder: Path) -> Path:
    """Saves a random model of 12 million weights with 4 KiB of KV per token."""
    from tests.runtime.tiny import save_tiny

    save = partial(save_tiny, hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64)
    return save(folder, num_hidden_layers=4, max_position_embeddings=CONTEXT)


async def wait_until_served(fleet: Fleet) -> None:
    body = bodies(1, 1, even=True)[0]
    async with session_for(4, None, 60) as session:
        for router in fleet.routers.values():
            while (await stream_answer(session, f"{router.base_url}/v1/completions", body)).error is not None:
                await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, Played]:
    """Plays all rounds after one of warm-up per mode; the first mode alternates."""
    await wait_until_served(fleet)
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
    flags = argparse.ArgumentParser(prog="python -m bench.moves.relief", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--model", type=Path, help="a model folder (default: a small random one)")
    flags.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    flags.add_argument("--groups", type=int, default=4)
    flags.add_argument("--rounds", type=int, default=20, help="rounds of each load in each mode")
    flags.add_argument("--requests", type=int, default=160, help="requests per round")
    flags.add_argument("--clients", type=int, default=36, help="concurrent requests")
    flags.add_argument("--own-clients", type=int, default=3, help="clients of the first engine in skewed rounds")
    flags.add_argument("--own-requests", type=int, default=20, help="their requests per round")
    flags.add_argument("--kv-cache-memory-bytes", type=int, default=PAGES_BYTES, help="KV cache of each engine")
    flags.add_argument("--timeout-s", type=float, default=120.0, help="timeout of a request")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, default=None)
    return flags


def main() -> int:
    """Runs the benchmark and returns the exit status; 2 for an invalid command line."""
    args = parser().parse_args()
    if "even" in args.loads and args.requests < 2 * args.clients:
        parser().error("an even load needs at least two requests per client (--requests, --clients): the first does not count")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines and routers end with this program
    with tempfile.TemporaryDirectory() as folder, running_fleet(args, Path(folder)) as fleet:
        played = asyncio.run(measure(args, fleet))
    claims = {load: judge(load, rounds) for load, rounds in played.items()}
    for load, rounds in played.items():
        print_tables(load, rounds, claims[load])
    print(f"load average of the machine: {os.getloadavg()[2]:.1f} over the last 15 minutes")
    if args.json is not None:
        args.json.write_text(
            json.dumps({load: {m: merged(r[m]).figures() for m in MODES} for load, r in played.items()}, indent=2)
        )
    failed = any(merged(rounds[mode]).figures()["failed"] for rounds in played.values() for mode in MODES)
    return 1 if failed or any(claim.verdict == "NO" for load_claims in claims.values() for claim in load_claims) else 0


if __name__ == "__main__":
    sys.exit(main())
