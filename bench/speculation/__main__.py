"""Measures speculation compared with plain decoding: acceptance and speed, with one model in one process.

    python -m bench.speculation MODEL [--method ngram] [--kinds editing chat] [--batches 1 8 64] [--control adaptive] [--pairs 7]
                                [--sampling '{"repetition_penalty": 1.2}']

A row is one kind of prompts and one number of concurrent requests, greedy by default; beyond the number of prompts, prompts
repeat with another first line. A plain and a speculating engine take turns step by step over one load of the weights; each has
half of the pages, without prefix caching. A pair is one run of all prompts by both; the first pair warms up and is not counted.

- speed: median of the pairs' ratios of tokens per second after the last step with prompt tokens, with its 95 % interval; it is
  compared with `--bound`.
- with prompts: ratio of the total time of all steps.
- mean accepted: accepted tokens per request and step with draft tokens.

With `--control fixed` and a draft, the limits of each row follow (`bench.speculation.limit`). Times exclude HTTP. In bf16 a step
with draft tokens may round differently, so texts may differ; `--dtype float32` counts the texts that differ. With `--threads 1`
times are CPU times.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from tokenizers import Tokenizer

from bench.frame.figures import markdown_header, markdown_row, median_interval
from bench.frame.one_rank import load_alone
from bench.frame.runner_parts import Part
from bench.speculation.limit import describe, times_of
from bench.speculation.outcome import Outcome, added, joined, since
from bench.speculation.prompts import KINDS, kinds_for
from phalanx_api import wire
from phalanx_api.speculation import TREE_SHAPES, Method, SpeculationCounts, Tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank_spec import RankReady

MAX_REQUESTS = 64
PARTS = 2


class Engine:
    """A scheduler that keeps its estimates of times and acceptance between runs, like a server's."""

    def __init__(
        self, part: Part, limits: Limits, speculation: SpeculationConfig, clock: Callable[[], float], sampling: wire.Sampling
    ) -> None:
        self._part = part
        self._clock = clock
        self._sampling = sampling
        config = SchedulerConfig(prefix_caching=False, speculation=speculation)
        self.scheduler: Scheduler = make_scheduler(limits, part.pool, config, part.fitting)
        self._handle = 0
        self._first = 1
        self._counts = SpeculationCounts()
        """Counters at the last step with prompt tokens."""
        self._outcome = Outcome([])

    def submit(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._first = self._handle + 1
        self._outcome, self._counts = Outcome([[] for _ in prompts]), self.scheduler.speculator.counts()
        for prompt in prompts:
            self._handle += 1
            sampling = msgspec.structs.replace(self._sampling, max_tokens=max_tokens, seed=self._handle)
            refusal = self.scheduler.submit(
                self._handle, wire.Request(id=str(self._handle), epoch=0, prompt=prompt, delivered=[], sampling=sampling)
            )
            assert refusal is None, f"the model refuses a prompt: {refusal}"

    def step(self) -> bool:
        if self.scheduler.is_idle():
            return False
        started, outcome = self._clock(), self._outcome
        plan = self.scheduler.schedule(started)
        assert plan is not None
        compute_started = self._clock()
        result = self._part.compute(plan)
        frame = self.scheduler.commit(result, self._clock() - compute_started)
        step_s = self._clock() - started
        outcome.total_s += step_s
        outcome.decode_s += step_s
        outcome.decoded += len(frame.tokens)
        outcome.draws += len(plan.draws)
        outcome.steps += 1
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            outcome.tokens[handle - self._first].append(token)
        if plan.admitted or len(plan.draws) < len(plan.rows) or not all(index for _, index in plan.draws):
            outcome.restart_decoding()
            self._counts = self.scheduler.speculator.counts()
        return True

    def outcome(self) -> Outcome:
        assert self.scheduler.num_preemptions == 0, "requests were preempted: --cache-mb is too small for this row"
        self._outcome.counts = since(self._counts, self.scheduler.speculator.counts())
        return self._outcome


def encoded(folder: Path, texts: Sequence[str], count: int, is_chat: bool) -> list[list[int]]:
    """Returns `count` prompts as tokens. Repeated texts begin with another line."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = []
    for index in range(count):
        text = texts[index % len(texts)]
        first_line = f"Request {index}.\n" if index >= len(texts) else ""
        if is_chat:
            text = f"<|im_start|>user\n{first_line}{text}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(text if is_chat else first_line + text).ids)
    return prompts


COLUMNS = (
    "kind",
    "requests",
    "draft tokens per step",
    "tokens per step",
    "acceptance rate by position",
    "mean accepted",
    "plain tok/s",
    "speed",
    "95 % interval",
    "pairs",
    "at least the bound",
    "with prompts",
    "different texts",
)


def row_of(kind: str, batch: int, pairs: Sequence[tuple[Outcome, Outcome]], bound: float) -> str:
    ratio = median_interval([ours.speed / plain.speed for plain, ours in pairs])
    total_ratio = sum(plain.total_s for plain, _ in pairs) / sum(ours.total_s for _, ours in pairs)
    proposed, accepted = added(ours.counts.drafted for _, ours in pairs), added(ours.counts.accepted for _, ours in pairs)
    decodes, paths = sum(ours.draws for _, ours in pairs), sum(ours.counts.paths for _, ours in pairs)
    cells = (
        kind,
        batch,
        f"{sum(proposed) / max(1, decodes):.2f}",
        f"{sum(ours.decoded for _, ours in pairs) / max(1, decodes):.2f}",
        " ".join(f"{hits / drafted:.2f}" for hits, drafted in zip(accepted, proposed, strict=True) if drafted) or "-",
        f"{sum(accepted) / paths:.2f}" if paths else "-",
        f"{median(plain.speed for plain, _ in pairs):.1f}",
        f"{ratio.middle:.3f}",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        len(pairs),
        ratio.verdict(bound),
        f"{total_ratio:.3f}",
        sum(a != b for plain, ours in pairs for a, b in zip(plain.tokens, ours.tokens, strict=True)),
    )
    return markdown_row(cells)


def has_all(pairs: Sequence[tuple[Outcome, Outcome]]) -> bool:
    """Returns whether at least 90 % of all possible draft tokens were drafted.

    Room in a step and the end of a request limit them.
    """
    counts = [ours.counts for _, ours in pairs]
    return sum(sum(count.drafted) for count in counts) >= 0.9 * sum(len(count.drafted) * count.paths for count in counts)


def describe_limits(pairs: Sequence[tuple[Outcome, Outcome]]) -> str:
    outcomes = [ours for _, ours in pairs]
    steps, paths = sum(outcome.steps for outcome in outcomes), sum(outcome.counts.paths for outcome in outcomes)
    accepted = [count / paths for count in added(outcome.counts.accepted for outcome in outcomes)]
    plain_s = sum(plain.decode_s for plain, _ in pairs) / sum(plain.steps for plain, _ in pairs)
    step_s = sum(outcome.decode_s for outcome in outcomes) / steps
    draft_s = sum(outcome.counts.draft_s for outcome in outcomes) / steps
    return describe(times_of(plain_s, step_s, draft_s, len(accepted)), accepted)


def take_turns(
    plain: Engine, ours: Engine, sets: Sequence[list[list[int]]], count: int, max_tokens: int
) -> list[tuple[Outcome, Outcome]]:
    """Returns `count` pairs after one for warm-up; each runs all sets one after another."""
    return [_pair(plain, ours, sets, max_tokens, ours_first=not index % 2) for index in range(count + 1)][1:]


def _pair(
    plain: Engine, ours: Engine, sets: Sequence[list[list[int]]], max_tokens: int, ours_first: bool
) -> tuple[Outcome, Outcome]:
    engines, outcomes = (ours, plain) if ours_first else (plain, ours), list[tuple[Outcome, Outcome]]()
    for prompts in sets:
        for engine in engines:
            engine.submit(prompts, max_tokens)
        while any([engine.step() for engine in engines]):  # a list, so that each runs one
            pass
        outcomes.append((plain.outcome(), ours.outcome()))
    return joined([outcome for outcome, _ in outcomes]), joined([outcome for _, outcome in outcomes])


def sampling_of(fields: dict[str, Any]) -> wire.Sampling:
    """Returns greedy sampling with these fields; a grammar has its kind and its text."""
    grammar = wire.Grammar(**fields["grammar"]) if "grammar" in fields else None
    return wire.Sampling(**{"max_tokens": 1, "seed": 0, "temperature": 0.0, **fields, "grammar": grammar})


def load(args: argparse.Namespace, method: Method) -> tuple[ModelRunner, RankReady]:
    return load_alone(
        args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        max_num_seqs=PARTS * MAX_REQUESTS,
        kv_cache_memory_bytes=args.cache_mb << 20,
        speculative_method=method,
        draft_dir=str(args.draft_model or ""),
        draft_exit=str(args.exit or ""),
        speculative_ratio=args.ratio,
    )[:2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description="Measures speculation compared with plain decoding."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft-model", type=Path, help="model folder for --method draft")
    parser.add_argument("--exit", type=Path, help="file of `phalanx-runtime fit-exit` for --method self_draft")
    parser.add_argument("--ratio", type=float, help="share of the layers for --method self_draft")
    parser.add_argument("--tokens", type=int, default=6, help="maximum draft tokens of a request")
    parser.add_argument("--tree", type=int, nargs="+", default=[], metavar="N", help="children of a node by tree level")
    parser.add_argument("--tree-shape", choices=TREE_SHAPES, default="best_first")
    parser.add_argument("--control", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sampling", default="{}", help="sampling fields of each request as JSON; default: greedy")
    parser.add_argument("--pairs", type=int, default=7, help="counted runs of each engine")
    parser.add_argument("--bound", type=float, default=0.97, help="bound of the ratio")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-mb", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=2048, help="token budget of a step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    method: Method = args.method
    runner, ready = load(args, method)
    limits = Limits(max_model_len=min(2048, ready.max_model_len), max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=args.budget)
    clock = runner.clock = time.thread_time if args.threads == 1 else time.perf_counter
    tree = Tree(args.tree, args.tree_shape)
    drafts = SpeculationConfig(
        method=method,
        num_tokens=args.tokens,
        is_adaptive=args.control == "adaptive",
        draft_methods=frozenset({method}),
        tree=tree,
    )
    sampling = sampling_of(json.loads(args.sampling))
    plain, ours = (
        Engine(Part(runner, part, PARTS, MAX_REQUESTS), limits, speculation, clock, sampling)
        for part, speculation in enumerate((SpeculationConfig(), drafts))
    )
    is_chat = "<|im_start|>" in (args.model / "tokenizer.json").read_text()
    print(markdown_header(COLUMNS), flush=True)
    limit_lines, texts = list[str](), kinds_for(ready.max_model_len)
    for batch in args.batches:
        for kind in args.kinds:
            prompts = encoded(args.model, texts[kind], max(batch, len(texts[kind])), is_chat)
            sets = [prompts[first : first + batch] for first in range(0, len(prompts) - batch + 1, batch)]
            pairs = take_turns(plain, ours, sets, args.pairs, args.max_tokens)
            print(row_of(kind, batch, pairs, args.bound), flush=True)
            if args.control == "fixed" and method != "ngram" and not args.tree and has_all(pairs):
                limit_lines.append(f"{kind}, {batch}: {describe_limits(pairs)}")
    print("", *limit_lines, sep="\n")


if __name__ == "__main__":
    main()
