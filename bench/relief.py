"""What moving running requests is worth: real engines with few pages, and the same requests with moves off and on in turn.

    python -m bench.relief                              both loads: with skew and even, each round once in each mode
    python -m bench.relief --loads skewed --rounds 12

Two routers have a link to every group, one with mode Off and one with mode Migrate; each gets the load in its rounds. With skew
lengths of outputs are log-normal, and the first group also serves clients of its own, of whom no router knows. An even load is of
equal requests. Shown: preemptions of the engines, the longest gap of each stream, times to the first token and between tokens,
moves by why and how they ended. Judged: with skew fewer preemptions and a lower P99 of the longest gap; under even load P99 TTFT,
P99 TPOT and tokens per second within 5 %. Exits 1 when a request failed, or something judged is not so.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.client import Answer, session_for, stream_answer
from bench.figures import Ratio, percentile, ratio_of, table
from bench.programs import Program, running

MODES = ("Off", "Migrate")
LOADS = ("skewed", "even")
PROMPT_TOKENS, MEDIAN_OUTPUT, SPREAD = 64, 150.0, 1.0
LONGEST_OUTPUT = 800
EVEN_OUTPUT = 128
CONTEXT = 2048
NEAR = 0.05
"""How far an even load may be from what it is without moves."""
GAP, TTFT, TPOT, RATE = "longest gap p99, ms", "ttft p99, ms", "tpot p99, ms", "tokens/s"
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:{[^}]*})? (\S+)$", re.M)
MOVES = re.compile(r'^phalanx_router_moves_total{outcome="(\w+)",why="(\w+)"} (\S+)$', re.M)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, and a router for each mode."""

    engines: list[Program]
    routers: dict[str, Program]


@dataclass(frozen=True, slots=True)
class Round:
    """What one mode did with one set of requests, or with several."""

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
            GAP: 1e3 * percentile([max(answer.gaps_s, default=0.0) for answer in whole], 99),
            TTFT: 1e3 * percentile([answer.ttft_s for answer in whole], 99),
            TPOT: 1e3 * percentile(tpots, 99),
            RATE: sum(answer.completion_tokens for answer in whole) / self.seconds,
        } | {f"moves {why}": count for why, count in sorted(self.moves.items())}


Played = dict[str, list[Round]]
"""All rounds of one load, by mode; those at the same place had the same requests."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that is judged: what it was with moves off and on over all rounds, the ratio of pairs, and whether it holds."""

    what: str
    off: float
    on: float
    ratio: Ratio | None
    bound: str
    is_met: bool


def joined(rounds: Sequence[Round]) -> Round:
    """All rounds as one: percentiles are then of all their requests."""
    answers = [answer for one in rounds for answer in one.answers]
    names = dict.fromkeys(name for one in rounds for name in one.moves)
    moved = {name: sum(one.moves.get(name, 0.0) for one in rounds) for name in names}
    return Round(answers, sum(one.seconds for one in rounds), sum(one.preemptions for one in rounds), moved)


def judge(load: str, played: Played) -> list[Claim]:
    """What is claimed of this load. Preemptions have no ratio: a round may have none."""
    off, on = (joined(played[mode]).figures() for mode in MODES)

    def ratio(name: str) -> Ratio:
        theirs, ours = ([one.figures()[name] for one in played[mode]] for mode in MODES)
        return ratio_of(ours, theirs)

    if load == "skewed":
        fewer = on["preemptions"] < off["preemptions"]
        lower = on[GAP] < off[GAP]
        return [
            Claim("preemptions", off["preemptions"], on["preemptions"], None, "fewer", fewer),
            Claim(GAP, off[GAP], on[GAP], ratio(GAP), "lower", lower),
        ]
    bounds = {TTFT: on[TTFT] <= (1 + NEAR) * off[TTFT], TPOT: on[TPOT] <= (1 + NEAR) * off[TPOT]}
    bounds[RATE] = on[RATE] >= (1 - NEAR) * off[RATE]
    return [Claim(name, off[name], on[name], ratio(name), f"{NEAR:.0%}", met) for name, met in bounds.items()]


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


async def play(args: argparse.Namespace, fleet: Fleet, mode: str, seed: int, even: bool) -> Round:
    """One round, until all requests have ended. In a skewed one the first engine has some of its own, the same in each mode."""
    router, count = fleet.routers[mode], args.requests
    async with session_for(4 * args.clients, None, args.timeout_s) as session:
        before, moved = await preemptions(session, fleet), await moves(session, router)
        own = iter([] if even else bodies(seed + 1000, args.own_requests, even=False))
        started = time.perf_counter()
        answers, others = await asyncio.gather(
            load(session, router.base_url, iter(bodies(seed, count, even)), args.clients),
            load(session, fleet.engines[0].base_url, own, args.own_clients),
        )
        seconds = max((answer.ended for answer in answers), default=started) - started
        after, then = await preemptions(session, fleet), await moves(session, router)
        failed = [answer for answer in others if answer.error is not None]
        return Round(answers + failed, seconds, after - before, {why: n - moved.get(why, 0.0) for why, n in then.items()})


@contextmanager
def running_fleet(args: argparse.Namespace, folder: Path) -> Iterator[Fleet]:
    """Engines with few pages and both routers, ready."""
    token = folder / "token"
    token.write_text("of the bench")
    flags = ["--token-file", str(token), "--kv-cache-memory-bytes", str(args.kv_cache_memory_bytes)]
    flags += ["--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--no-enable-prefix-caching"]
    model = str(args.model or tiny(folder / "tiny"))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(running(f"engine-{number}", "phalanx_runtime", ["serve", model, *flags], folder))
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


def tiny(folder: Path) -> Path:
    """A random model that computes a step in a moment, and whose requests are long beside the pages."""
    from tests.runtime.tiny import save_tiny

    return save_tiny(folder, max_position_embeddings=CONTEXT)


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


def show(load: str, played: Played, claims: Sequence[Claim]) -> None:
    """Both tables of one load."""
    figures = {mode: joined(played[mode]).figures() for mode in MODES}
    names = list(dict.fromkeys(name for mode in MODES for name in figures[mode]))
    print(table([load, *MODES], [[name, *(f"{figures[mode].get(name, 0.0):.1f}" for mode in MODES)] for name in names]))
    rows = []
    for claim in claims:
        pairs = [f"{claim.ratio.mean:.2f}", f"{claim.ratio.low:.2f} to {claim.ratio.high:.2f}"] if claim.ratio else ["", ""]
        rows.append([claim.what, f"{claim.off:.1f}", f"{claim.on:.1f}", *pairs, claim.bound, "yes" if claim.is_met else "NO"])
    print(table(["judged", *MODES, "ratio of pairs", "95 % interval", "bound", "holds"], rows) + "\n", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.relief", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--model", type=Path, help="a model folder (default: a tiny random one)")
    made.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    made.add_argument("--groups", type=int, default=4)
    made.add_argument("--rounds", type=int, default=6, help="of each load in each mode")
    made.add_argument("--requests", type=int, default=80, help="requests of a round")
    made.add_argument("--clients", type=int, default=16, help="requests of a round that run at once")
    made.add_argument("--own-clients", type=int, default=4, help="clients of the first engine itself, in skewed rounds")
    made.add_argument("--own-requests", type=int, default=20, help="their requests in a round")
    made.add_argument("--kv-cache-memory-bytes", type=int, default=1_300_000, help="of each engine")
    made.add_argument("--timeout-s", type=float, default=120.0, help="a request that takes longer has failed")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, default=None)
    return made


def main() -> int:
    """Runs all; 1 when a request failed, or a claim does not hold."""
    args = parser().parse_args()
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
    return 1 if failed or not all(claim.is_met for one in claims.values() for claim in one) else 0


if __name__ == "__main__":
    sys.exit(main())
