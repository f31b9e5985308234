"""Measures runtime and router compared with transformers, as ratios with their 95 % interval.

    python -m bench.engine.versus_transformers --model DIR [--pairs 7] [--json out.json]

| comparison, in tokens/s | bound |
|---|---|
| 16 concurrent requests against `generate` one after another | 5 |
| the same 16 against `generate` on one left-padded batch | 1.5 |
| decoding of one stream against that of `generate` | 1 |
| 16 concurrent requests through the router against the runtime directly | 0.95 |

The runtime serves HTTP with its defaults; both compute in the processor's fastest dtype with one thread per core. Each round has
new prompts, so that prefix caches have no effect; the order within a round alternates. A comparison has three rounds, or
`--pairs` while its ratio is within 10 % of the bound or the interval contains the bound. In fp32 our greedy tokens must equal
those of `generate`, near-ties excepted. Exits with 1 if a bound is missed or tokens differ.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from bench.engine.engines import Engine, Generate, Prompts, Served, Turn, Worker, running_worker
from bench.engine.versus import Comparison, Match
from bench.frame.equality import Equality, compare, merge
from bench.frame.figures import table
from bench.frame.programs import running
from bench.frame.workload import spread_lengths, token_ids

_NAME = "bench"
_HEADER = ["tokens/s", "ours", "theirs", "ratio", "95 % interval", "pairs", "bound", "holds"]
_IDLE_LIMIT = 0.02


@dataclass(slots=True)
class Workload:
    """Seeded sets of prompts, all different."""

    folder: Path
    seed: int
    shortest: int
    longest: int
    num_sets: int = 0

    def prompts(self, num_prompts: int) -> Prompts:
        self.num_sets += 1
        return token_ids(self.folder, self.seed + 1000 * self.num_sets, spread_lengths(num_prompts, self.shortest, self.longest))


@dataclass(slots=True)
class Checks:
    tokenizer: Tokenizer
    worker: Worker
    outcomes: list[Equality] = field(default_factory=list)

    def __call__(self, prompts: Prompts, turns: dict[str, Turn]) -> None:
        """Compares our texts with the tokens of `generate`. The padded batch is no reference: padding changes the sums."""
        references = [turn.tokens for name, turn in turns.items() if turn.tokens is not None and "batch" not in name]
        for turn in turns.values():
            if turn.texts is not None and references:
                self.outcomes.append(self._compare(prompts, turn.texts, references[0]))

    def _compare(self, prompts: Prompts, texts: list[str], tokens: list[list[int]]) -> Equality:
        def gap_at(stream: int, index: int) -> float:
            return self.worker.gaps(prompts[stream], tokens[stream])[index]

        return compare(self.tokenizer, texts, tokens, gap_at)


def fastest_dtype(flags: set[str]) -> str:
    """Returns bfloat16 if the processor multiplies it, otherwise float32: without that, bf16 in torch is far slower."""
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"


def processor() -> tuple[str, set[str]]:
    fields = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench.engine.versus_transformers", description="Compares runtime and router with transformers."
    )
    flags.add_argument("--model", type=Path, required=True, help="a model folder")
    flags.add_argument("--pairs", type=int, default=7, help="maximum rounds of a comparison near its bound")
    flags.add_argument("--concurrency", type=int, default=16)
    flags.add_argument("--input-len-min", type=int, default=64, help="tokens of the shortest prompt")
    flags.add_argument("--input-len", type=int, default=256, help="tokens of the longest prompt")
    flags.add_argument("--output-len", type=int, default=64, help="tokens of every answer")
    flags.add_argument("--decode-len", type=int, default=128, help="tokens of the answer whose decoding is timed")
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], default=None, help="default: the processor's fastest")
    flags.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of the runtime")
    flags.add_argument("--only", choices=["generate", "decode", "router"], nargs="+", default=["generate", "decode", "router"])
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, default=None, help="file for the figures as JSON")
    return flags


def start(args: argparse.Namespace, dtype: str, stack: ExitStack) -> tuple[dict[str, Engine], Worker]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    token_file = folder / "token"
    token_file.write_text("bench-" + os.urandom(16).hex())
    threads = len(os.sched_getaffinity(0))
    worker = stack.enter_context(running_worker(args.model, dtype, threads, folder / "transformers.log"))
    common = ["--served-model-name", _NAME, "--token-file", str(token_file)]
    # Engines get the same prompts, some more than once: a prefix cache would skip their computation.
    ranks = ["--tensor-parallel-size", str(args.tensor_parallel_size), "--dtype", dtype, "--no-enable-prefix-caching"]
    runtime = stack.enter_context(running("runtime", "phalanx_runtime", ["serve", str(args.model), *common, *ranks], folder))
    engines: list[Engine] = [
        Served("runtime", runtime, _NAME),
        Served("runtime-decode", runtime, _NAME, decode_only=True),
        Generate("transformers-one-by-one", worker, "one_by_one"),
        Generate("transformers-batch", worker, "batch"),
        Generate("transformers-decode", worker, "decode"),
    ]
    if "router" in args.only:
        leader = ["--leaders", runtime.base_url.removeprefix("http://")]
        router = stack.enter_context(running("router", "phalanx_router", ["serve", *common, *leader], folder))
        engines.append(Served("router", router, _NAME))
    return {engine.name: engine for engine in engines}, worker


def play(args: argparse.Namespace, dtype: str, match: Match, worker: Worker) -> tuple[list[Comparison], Equality]:
    workload = Workload(args.model, args.seed, args.input_len_min, args.input_len)
    checks = Checks(Tokenizer.from_file(str(args.model / "tokenizer.json")), worker)
    for name in match.engines:
        match.engines[name].run(workload.prompts(1 if name.endswith("decode") else args.concurrency), 8)
    many = f"{args.concurrency} concurrent"
    by_part = {
        "generate": [
            Comparison(f"{many} / generate one by one", "runtime", "transformers-one-by-one", 5.0),
            Comparison(f"{many} / generate padded batch", "runtime", "transformers-batch", 1.5),
        ],
        "decode": [Comparison("one stream's decoding / generate's", "runtime-decode", "transformers-decode", 1.0)],
        "router": [Comparison(f"{many}, router / direct", "router", "runtime", 0.95)],
    }
    for part in args.only:
        num_prompts, length = (1, args.decode_len) if part == "decode" else (args.concurrency, args.output_len)

        def new_prompts(num_prompts: int = num_prompts) -> Prompts:
            return workload.prompts(num_prompts)

        match.play(by_part[part], args.pairs, length, new_prompts, checks if dtype == "float32" else _unchecked)
    return [comparison for part in args.only for comparison in by_part[part]], merge(checks.outcomes)


def _unchecked(prompts: Prompts, turns: dict[str, Turn]) -> None:
    """Compares nothing: in bf16 another batch shape may sample another token."""


def format_report(comparisons: list[Comparison], equality: Equality, idle: dict[str, float]) -> str:
    lines = [table(_HEADER, [comparison.row() for comparison in comparisons]), ""]
    if equality.num_tokens:
        verdict = "equal" if equality.holds else "DIFFERENT"
        lines.append(
            f"greedy tokens: {verdict} ({equality.num_compared:,} of {equality.num_tokens:,} compared,"
            f" {equality.num_near_ties} near-ties)"
        )
        lines += equality.different
    else:
        lines.append("greedy tokens: not compared (fp32 only)")
    lines += [
        f"idle {name}: at most {share:.1%} of a core{'  TOO MUCH' if share > _IDLE_LIMIT else ''}" for name, share in idle.items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engines end with this program
    name, flags = processor()
    dtype = args.dtype or fastest_dtype(flags)
    with ExitStack() as stack:
        engines, worker = start(args, dtype, stack)
        match = Match(engines)
        comparisons, equality = play(args, dtype, match, worker)
    idle = {engine: max(shares) for engine, shares in match.idle_shares.items()}
    cores = len(os.sched_getaffinity(0))
    print(f"{name}, {cores} cores, {dtype}, transformers {version('transformers')}, torch {version('torch')}\n")
    print(format_report(comparisons, equality, idle))
    if args.json is not None:
        result = {
            "processor": name,
            "cores": cores,
            "dtype": dtype,
            "versions": {package: version(package) for package in ("transformers", "torch")},
            "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
            "comparisons": [comparison.figures() for comparison in comparisons],
            "equality": asdict(equality) | {"holds": equality.holds},
            "idle_core_share": match.idle_shares,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(comparison.verdict != "NO" for comparison in comparisons) and equality.holds else 1


if __name__ == "__main__":
    sys.exit(main())
