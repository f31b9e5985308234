"""Compares equal requests in flight with and without coalescing: what a group computes, and how long clients wait.

    python -m bench.router.equal_requests [MODEL] [--copies 16] [--prompt 256] [--output 64] [--rounds 9]

One router coalesces and one does not; both are linked to one group. Each round sends the copies of one greedy request at once to
each router, in a changing order. Prompts are new, and each router has a `cache_salt` of its own, so the prefix cache serves only
copies of one round. Prompt tokens are those of the requests that the group started, less those found in its prefix cache. Exits
with 1 if texts differ between copies or routers.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from bench.frame.client import session_for, stream_answer
from bench.frame.figures import mean_ratio, percentile, table
from bench.frame.programs import Program, running
from bench.moves.relief import save_small
from phalanx_api.summary import BalancePolicy

MODES = {"apart": False, "coalesced": True}
LOOKED_UP, FOUND = (
    re.compile(rf"^vllm:prefix_cache_{name}_total{{[^}}]*}} ([0-9.e+]+)$", re.MULTILINE) for name in ("queries", "hits")
)
REPORT_S = 0.5
"""Longest age of a group's counters."""


@dataclass(slots=True)
class Mode:
    """One router and its measurements, one per round."""

    router: Program
    started: list[float] = field(default_factory=list)  # requests that the group computed
    prompt_tokens: list[float] = field(default_factory=list)  # that it computed
    cpu_s: list[float] = field(default_factory=list)  # of the group
    whole_s: list[float] = field(default_factory=list)  # until all copies had their whole texts
    ttft_s: list[float] = field(default_factory=list)  # of each copy


@contextmanager
def programs(model: str, folder: Path) -> Iterator[tuple[Program, dict[str, Mode]]]:
    """Runs a group and both routers until the block ends."""
    (folder / "token").write_text("token of the bench")
    secret = ["--token-file", str(folder / "token")]
    with ExitStack() as stack:
        group = stack.enter_context(running("group", "phalanx_runtime", ["serve", model, *secret], folder))
        modes = {}
        for name, coalesces in MODES.items():
            policy = folder / f"{name}.json"
            policy.write_bytes(msgspec.json.encode(BalancePolicy(coalesce_requests=coalesces)))
            flags = ["serve", "--leaders", group.base_url.removeprefix("http://"), "--policy-file", str(policy), *secret]
            modes[name] = Mode(stack.enter_context(running(f"router-{name}", "phalanx_router", flags, folder)))
        yield group, modes


async def counters(session: aiohttp.ClientSession, group: Program) -> tuple[float, float]:
    """Returns the prompt tokens that the group has looked up and found, once it has reported them."""
    await asyncio.sleep(REPORT_S)
    async with session.get(f"{group.base_url}/metrics") as response:
        page = await response.text()
    looked_up, found = (float(pattern.findall(page)[0]) for pattern in (LOOKED_UP, FOUND))
    return looked_up, found


async def play(
    session: aiohttp.ClientSession, group: Program, mode: Mode, body: dict[str, object], copies: int, prompt: int
) -> list[str]:
    """Sends the copies at once and records what they cost. Returns their texts. Raises RuntimeError if one fails."""
    before, started, cpu_s = await counters(session, group), time.perf_counter(), group.cpu_s()
    answers = await asyncio.gather(
        *(stream_answer(session, f"{mode.router.base_url}/v1/completions", body) for _ in range(copies))
    )
    mode.whole_s.append(time.perf_counter() - started)
    mode.cpu_s.append(group.cpu_s() - cpu_s)
    failures = [answer.error for answer in answers if answer.error is not None]
    if failures:
        raise RuntimeError(failures[0])
    looked_up, found = (now - then for now, then in zip(await counters(session, group), before, strict=True))
    mode.started.append(looked_up / prompt)
    mode.prompt_tokens.append(looked_up - found)
    mode.ttft_s += [answer.ttft_s for answer in answers]
    return [answer.text for answer in answers]


async def measure(args: argparse.Namespace, group: Program, modes: dict[str, Mode]) -> bool:
    """Plays all rounds after one of warm-up. Returns whether all texts of each round are equal."""
    draw, is_equal = random.Random(args.seed), True
    async with session_for(args.copies, None, 120) as session:
        for number in range(args.rounds + 1):
            prompt, texts = [draw.randrange(256) for _ in range(args.prompt)], set[str]()
            for name in list(MODES) if number % 2 else reversed(MODES):
                body: dict[str, object] = {"prompt": prompt, "max_tokens": args.output, "temperature": 0, "ignore_eos": True}
                body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": name}
                texts |= {*await play(session, group, modes[name], body, args.copies, args.prompt)}
            is_equal &= len(texts) == 1
            if not number:
                for name, mode in modes.items():
                    modes[name] = Mode(mode.router)
    return is_equal


def rows(modes: dict[str, Mode], output: int) -> list[list[str]]:
    """Returns the cells of the table: means of a round, and the median and the 99th percentile of waits for a first token."""
    result = []
    for name, mode in modes.items():
        count = len(mode.started)
        columns = (mode.started, mode.prompt_tokens, mode.cpu_s, mode.whole_s)
        started, prompt, cpu_s, whole_s = (sum(column) / count for column in columns)
        waits = [f"{1e3 * percentile(mode.ttft_s, percent):.0f}" for percent in (50, 99)]
        result.append(
            [name, f"{started:.1f}", f"{prompt:.0f}", f"{started * output:.0f}", f"{cpu_s:.2f}", *waits, f"{whole_s:.2f}"]
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison."""
    flags = argparse.ArgumentParser("python -m bench.router.equal_requests", description="Measure the worth of coalescing.")
    flags.add_argument("model", nargs="?", help="a model folder (default: a small random one)")
    flags.add_argument("--copies", type=int, default=16, metavar="N", help="equal requests at once")
    flags.add_argument("--prompt", type=int, default=256, metavar="TOKENS")
    flags.add_argument("--output", type=int, default=64, metavar="TOKENS")
    flags.add_argument("--rounds", type=int, default=9, metavar="N")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(save_small(Path(folder) / "small"))
        with programs(model, Path(folder)) as (group, modes):
            is_equal = asyncio.run(measure(args, group, modes))
    header = ["requests", "computed", "prompt tokens", "output tokens", "CPU, s", "TTFT p50, ms", "TTFT p99, ms", "all texts, s"]
    print(table(header, rows(modes, args.output)))
    apart, coalesced = modes.values()
    for what, ratio in {
        "CPU of the group": mean_ratio(apart.cpu_s, coalesced.cpu_s),
        "time until all texts": mean_ratio(apart.whole_s, coalesced.whole_s),
    }.items():
        print(f"{what}, apart / coalesced: {ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), {ratio.num_pairs} pairs")
    if not is_equal:
        print("texts of equal requests differ", file=sys.stderr)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
