"""Compares the rungs of memory for KV pages side by side: groups with a small pool, and host memory, a disk or pulls below it.

    python -m bench.kv_cache.ladder [MODEL] [--prefixes 12] [--prompt 512] [--rounds 5]

Each visit sends a prompt, one of several prefixes with an end of its own, to every group: first to the one without a limit,
then to the others in a changing order; a round visits all prefixes in a random order. The first round is not measured. The pool
of most groups holds a quarter of the prefixes. Reported are the share of prompt tokens that a group did not compute, and the
time to the first token, with the median over visits of device only / rung. The bench orders the pulls, whatever they cost.
Exits with 1 if first tokens differ."""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.frame.figures import percentile, table
from bench.frame.programs import running
from bench.moves.mover import Mover, linked
from phalanx_api import wire
from phalanx_api.moves import Arrived
from phalanx_api.prefix import PrefixKeys, root_key

TOKEN = "bench"
PAGE = 16
END_TOKENS = 16
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 8192}
"""Of the default model: a prompt takes much longer to compute than to copy, as on larger ones."""
NO_LIMIT, DEVICE, HOST, DISK, PULLED = (
    "no limit",
    "device only",
    "host memory",
    "host memory and disk",
    "pulled from another group",
)
POOL_SHARE = 0.25
"""Of all prefixes, what the pools hold, and host memory above a disk."""


@dataclass(slots=True)
class Rung:
    """One group and its measurements, one per visit."""

    name: str
    ttft_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_pulled: int = 0
    start: tuple[int, int] = 0, 0
    """Prompt tokens looked up and found before the measured rounds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in the order of their visits."""

    prompts: list[list[int]]
    num_unmeasured: int

    @staticmethod
    def draw(num_prefixes: int, length: int, rounds: int, seed: int) -> "Trace":
        rng = random.Random(seed)
        prefixes = [[rng.randrange(250) for _ in range(length)] for _ in range(num_prefixes)]
        prompts = []
        for _ in range(rounds + 1):
            for prefix in rng.sample(prefixes, num_prefixes):
                prompts.append([*prefix, *(rng.randrange(250) for _ in range(END_TOKENS))])
        return Trace(prompts, num_prefixes)


class Ladder:
    """The groups, by rung: number 0 has all prefixes on its device, and the last one pulls from it."""

    def __init__(self, mover: Mover, names: Sequence[str]) -> None:
        self.rungs = [Rung(name) for name in names]
        self._mover = mover
        self._num_requests = 0
        self._num_tokens = [0] * len(names)
        """Prompt tokens that each group got."""

    def run(self, trace: Trace) -> None:
        """Sends all prompts to all rungs."""
        for number, prompt in enumerate(trace.prompts):
            if number == trace.num_unmeasured:
                for group, rung in enumerate(self.rungs):
                    rung.start = self._counts(group)
                    rung.ttft_s.clear()
            later = [*range(1, len(self.rungs))]
            turn = number % len(later)
            for group in [0, *later[turn:], *later[:turn]]:  # the group without a limit first: the last one pulls from it
                self._visit(group, prompt)

    def hit_rate(self, group: int) -> float:
        """Returns the share of the measured prompt tokens that a group did not compute."""
        queried, hits = (now - before for now, before in zip(self._counts(group), self.rungs[group].start, strict=True))
        return hits / queried

    def _visit(self, group: int, prompt: list[int]) -> None:
        mover, rung = self._mover, self.rungs[group]
        self._num_requests += 1
        self._num_tokens[group] += len(prompt)
        sampling = wire.Sampling(max_tokens=1, seed=7, temperature=0.0)
        request = wire.Request(id=f"r{self._num_requests}", epoch=0, prompt=prompt, delivered=[], sampling=sampling)
        started = time.perf_counter()
        if rung.name == PULLED:
            keys = PrefixKeys(root_key(mover.served[0].page_model), PAGE).extend(prompt[:-END_TOKENS])
            stream, end = mover.pull(request, keys, 0, group, len(keys) * PAGE)
            rung.num_pulled += isinstance(end, Arrived)
        else:
            stream = mover.submit(request, group)
        mover.until(lambda: stream.finish is not None or stream.refused is not None)
        rung.ttft_s.append(stream.times[0] - started)
        rung.tokens += stream.tokens

    def _counts(self, group: int) -> tuple[int, int]:
        """Returns the prompt tokens that a group looked up and found; waits for its last report."""
        self._mover.until(lambda: self._mover.loads[group].prefix_queried_tokens >= self._num_tokens[group])
        load = self._mover.loads[group]
        return load.prefix_queried_tokens, load.prefix_hit_tokens


def open_ladder(stack: ExitStack, model: str, folder: Path, num_pages: int, dtype: str) -> Ladder:
    """Starts the groups, whose prefixes have `num_pages` in all."""
    (folder / "token").write_text(TOKEN)
    base = ["serve", model, "--token-file", str(folder / "token"), "--page-size", str(PAGE), "--dtype", dtype]

    def start(name: str, num_bytes: int, *flags: str) -> str:
        more = ["--kv-cache-memory-bytes", str(num_bytes), *flags]
        program = stack.enter_context(running(name.replace(" ", "-"), "phalanx_runtime", [*base, *more], folder))
        return program.base_url

    urls = [start(NO_LIMIT, 1 << 28)]
    whole = Mover([stack.enter_context(linked(urls[0], TOKEN))])
    whole.until(lambda: 0 in whole.served)
    page_bytes = whole.served[0].page_bytes
    small, large = (int(share * num_pages * page_bytes) for share in (POOL_SHARE, 1.2))
    urls.append(start(DEVICE, small))
    urls.append(start(HOST, small, "--host-cache-memory", str(large)))
    disk = ["--disk-cache-path", str(folder / "disk"), "--disk-cache-bytes", str(1 << 30)]
    urls.append(start(DISK, small, "--host-cache-memory", str(small), *disk))
    urls.append(start(PULLED, small))
    mover = Mover([stack.enter_context(linked(url, TOKEN)) for url in urls])
    mover.until(lambda: len(mover.served) == len(urls))
    return Ladder(mover, [NO_LIMIT, DEVICE, HOST, DISK, PULLED])


def rows(ladder: Ladder) -> list[list[str]]:
    """Returns the cells of the table, device only first."""
    by_name = {rung.name: (group, rung) for group, rung in enumerate(ladder.rungs)}
    alone = by_name[DEVICE][1]
    result = []
    for name in (DEVICE, HOST, DISK, PULLED, NO_LIMIT):
        group, rung = by_name[name]
        ratio = statistics.median(before / now for before, now in zip(alone.ttft_s, rung.ttft_s, strict=True))
        times = [f"{1e3 * percentile(rung.ttft_s, percent):.1f}" for percent in (50, 99)]
        result.append([name, f"{ladder.hit_rate(group):.1%}", *times, f"{ratio:.2f}"])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison."""
    flags = argparse.ArgumentParser("python -m bench.kv_cache.ladder", description="Compare the rungs of memory for KV pages.")
    flags.add_argument("model", nargs="?", help="a model folder (default: a small random one)")
    flags.add_argument("--prefixes", type=int, default=12, metavar="N")
    flags.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="of a prefix")
    flags.add_argument("--rounds", type=int, default=5, metavar="N")
    flags.add_argument("--dtype", default="float32")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, metavar="FILE", help="file for the figures as JSON")
    args = flags.parse_args(argv)
    from tests.runtime.tiny import save_tiny

    trace = Trace.draw(args.prefixes, args.prompt, args.rounds, args.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or str(save_tiny(folder / "small", **SIZES))
        ladder = open_ladder(stack, model, folder, args.prefixes * args.prompt // PAGE, args.dtype)
        ladder.run(trace)
        header = ["rung", "tokens not computed", "TTFT p50, ms", "TTFT p99, ms", "device only / rung"]
        cells = rows(ladder)
    print(table(header, cells))
    print(f"{ladder.rungs[-1].num_pulled} of {len(trace.prompts)} prompts were pulled")
    if args.json is not None:
        args.json.write_text(json.dumps({row[0]: row[1:] for row in cells}, indent=2) + "\n")
    is_equal = all(rung.tokens == ladder.rungs[0].tokens for rung in ladder.rungs)
    if not is_equal:
        print("first tokens differ between the groups", file=sys.stderr)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
