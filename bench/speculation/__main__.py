"""Speculation against plain decoding with one model in one process: what is accepted, and what it is worth.

    python -m bench.speculation MODEL [--method ngram] [--kinds editing chat] [--batches 1 8 64] [--control adaptive] [--pairs 7]
                                [--sampling '{"repetition_penalty": 1.2}']

Each row: prompts of one kind, so many at once, greedy if not told otherwise, a prompt again and again with another first line
where there are more requests than prompts. A plain and a speculating engine take turns step by step, over one load of the
weights and each its half of the pages, caches off. A pair is all prompts of the kind, one set after the other where fewer are
asked at once; the first one of a row warms both and is not counted. The row tells the median of the pairs' ratios, of tokens
per second behind the last step with prompt tokens, with its 95 % interval, whether that is above, below or not
to be told from --bound, and the ratio of the sums of the time of all steps of all pairs, in which seldom and dear steps count for
what they take. "Mean accepted" is of a request's proposals in one step, where it had any. With --control fixed and drafts it ends
with what limits each row (`bench.speculation.limit`). Times are those of an engine without HTTP. In bf16 a step with proposals
may round otherwise, so texts may part, and their ends with them; --dtype float32 counts texts that differ. One thread is measured
by its own time on the processor, so that neighbours hardly count.
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

from bench.frame.figures import Median, median_of
from bench.frame.one_rank import load_alone
from bench.frame.runner_parts import Part
from bench.speculation.limit import line_of, times_of
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

MOST_REQUESTS = 64
PARTS = 2


class Engine:
    """A scheduler that is kept between rounds, as a server's is: what it learns of times and acceptance stays."""

    def __init__(
        self, part: Part, limits: Limits, speculating: SpeculationConfig, clock: Callable[[], float], sampling: wire.Sampling
    ) -> None:
        self._part = part
        self._clock = clock
        self._sampling = sampling
        rules = SchedulerConfig(prefix_caching=False, speculating=speculating)
        self.scheduler: Scheduler = make_scheduler(limits, part.pool, rules, part.fitting)
        self._handle = 0
        self._first = 1
        self._counts = SpeculationCounts()
        """Until the last step with prompt tokens."""
        self._outcome = Outcome([])

    def begin(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Submits these prompts, all at once."""
        self._first = self._handle + 1
        self._outcome, self._counts = Outcome([[] for _ in prompts]), self.scheduler.speculator.counts()
        for prompt in prompts:
            self._handle += 1
            sampling = msgspec.structs.replace(self._sampling, max_tokens=max_tokens, seed=self._handle)
            refused = self.scheduler.submit(
                self._handle, wire.Request(id=str(self._handle), epoch=0, prompt=prompt, delivered=[], sampling=sampling)
            )
            assert refused is None, f"a prompt is no request for this model: {refused}"

    def step(self) -> bool:
        """Whether there was a step to make."""
        if self.scheduler.is_idle():
            return False
        began, outcome = self._clock(), self._outcome
        plan = self.scheduler.schedule(began)
        assert plan is not None
        computing = self._clock()
        result = self._part.compute(plan)
        frame = self.scheduler.commit(result, self._clock() - computing)
        took_s = self._clock() - began
        outcome.whole_s += took_s
        outcome.decode_s += took_s
        outcome.decoded += len(frame.tokens)
        outcome.draws += len(plan.draws)
        outcome.steps += 1
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            outcome.tokens[handle - self._first].append(token)
        if plan.admitted or len(plan.draws) < len(plan.rows) or not all(index for _, index in plan.draws):
            outcome.begin()
            self._counts = self.scheduler.speculator.counts()
        return True

    def outcome(self) -> Outcome:
        """What came of the prompts, once there is no step to make."""
        assert self.scheduler.num_preemptions == 0, "requests were preempted: --cache-mb is too small for this row"
        self._outcome.counts = since(self._counts, self.scheduler.speculator.counts())
        return self._outcome


def encoded(folder: Path, texts: Sequence[str], count: int, is_chat: bool) -> list[list[int]]:
    """So many prompts as tokens. Beyond the texts each begins with another line."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = []
    for at in range(count):
        text = texts[at % len(texts)]
        again = f"Request {at}.\n" if at >= len(texts) else ""
        if is_chat:
            text = f"<|im_start|>user\n{again}{text}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer.encode(text if is_chat else again + text).ids)
    return prompts


HEADS = (
    "kind",
    "requests",
    "proposed a step",
    "tokens a step",
    "accepted by position",
    "mean accepted",
    "plain tok/s",
    "speed",
    "95 % interval",
    "pairs",
    "beside the bound",
    "with prompts",
    "texts that differ",
)


def beside(ratio: Median, bound: float) -> str:
    """Where the interval of a ratio lies."""
    if ratio.low > bound:
        return "above"
    return "below" if ratio.high < bound else "not distinguishable"


def row_of(kind: str, batch: int, pairs: Sequence[tuple[Outcome, Outcome]], bound: float) -> str:
    """One line of the table."""
    ratio = median_of([ours.speed / plain.speed for plain, ours in pairs])
    whole = sum(plain.whole_s for plain, _ in pairs) / sum(ours.whole_s for _, ours in pairs)
    proposed, accepted = added(ours.counts.proposed for _, ours in pairs), added(ours.counts.accepted for _, ours in pairs)
    decodes, paths = sum(ours.draws for _, ours in pairs), sum(ours.counts.paths for _, ours in pairs)
    cells = (
        kind,
        batch,
        f"{sum(proposed) / max(1, decodes):.2f}",
        f"{sum(ours.decoded for _, ours in pairs) / max(1, decodes):.2f}",
        " ".join(f"{got / asked:.2f}" for got, asked in zip(accepted, proposed, strict=True) if asked) or "-",
        f"{sum(accepted) / paths:.2f}" if paths else "-",
        f"{median(plain.speed for plain, _ in pairs):.1f}",
        f"{ratio.middle:.3f}",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        len(pairs),
        beside(ratio, bound),
        f"{whole:.3f}",
        sum(a != b for one, two in pairs for a, b in zip(one.tokens, two.tokens, strict=True)),
    )
    return f"| {' | '.join(map(str, cells))} |"


def has_all(pairs: Sequence[tuple[Outcome, Outcome]]) -> bool:
    """Whether nearly all proposals were made that there are: a step has room for so many, and drafts end with their requests."""
    counts = [ours.counts for _, ours in pairs]
    return sum(sum(one.proposed) for one in counts) >= 0.9 * sum(len(one.proposed) * one.paths for one in counts)


def limit_of(pairs: Sequence[tuple[Outcome, Outcome]]) -> str:
    """What limits a row of drafted chains that are always made."""
    ours = [one for _, one in pairs]
    steps, paths = sum(one.steps for one in ours), sum(one.counts.paths for one in ours)
    accepted = [count / paths for count in added(one.counts.accepted for one in ours)]
    plain_s = sum(plain.decode_s for plain, _ in pairs) / sum(plain.steps for plain, _ in pairs)
    step_s, draft_s = sum(one.decode_s for one in ours) / steps, sum(one.counts.draft_s for one in ours) / steps
    return line_of(times_of(plain_s, step_s, draft_s, len(accepted)), accepted)


def take_turns(
    plain: Engine, ours: Engine, sets: Sequence[list[list[int]]], count: int, max_tokens: int
) -> list[tuple[Outcome, Outcome]]:
    """So many pairs behind one that is not counted, each of all sets one after the other."""
    return [_pair(plain, ours, sets, max_tokens, ours_first=not at % 2) for at in range(count + 1)][1:]


def _pair(
    plain: Engine, ours: Engine, sets: Sequence[list[list[int]]], max_tokens: int, ours_first: bool
) -> tuple[Outcome, Outcome]:
    engines, found = (ours, plain) if ours_first else (plain, ours), list[tuple[Outcome, Outcome]]()
    for prompts in sets:
        for engine in engines:
            engine.begin(prompts, max_tokens)
        while any([engine.step() for engine in engines]):  # each of them makes one
            pass
        found.append((plain.outcome(), ours.outcome()))
    return joined([one for one, _ in found]), joined([two for _, two in found])


def sampling_of(fields: dict[str, Any]) -> wire.Sampling:
    """Greedy, but for these fields. A grammar has its kind and its text."""
    grammar = wire.Grammar(**fields["grammar"]) if "grammar" in fields else None
    return wire.Sampling(**{"max_tokens": 1, "seed": 0, "temperature": 0.0, **fields, "grammar": grammar})


def load(args: argparse.Namespace, method: Method) -> tuple[ModelRunner, RankReady]:
    """The model on one rank of this process, with what drafts for it by this method, and what it tells of itself."""
    return load_alone(
        args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        max_num_seqs=PARTS * MOST_REQUESTS,
        kv_cache_memory_bytes=args.cache_mb << 20,
        speculative_method=method,
        draft_dir=str(args.draft_model or ""),
        draft_exit=str(args.exit or ""),
        speculative_ratio=args.ratio,
    )[:2]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description="Speculation against plain decoding.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft-model", type=Path, help="folder, for --method draft")
    parser.add_argument("--exit", type=Path, help="what fit-exit made, for --method self_draft")
    parser.add_argument("--ratio", type=float, help="of the layers, for --method self_draft")
    parser.add_argument("--tokens", type=int, default=6, help="most tokens proposed at once")
    parser.add_argument("--tree", type=int, nargs="+", default=[], metavar="N", help="tokens for one place, level by level")
    parser.add_argument("--tree-shape", choices=TREE_SHAPES, default="best_first")
    parser.add_argument("--control", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sampling", default="{}", help="fields of a request's sampling beside greedy, as JSON")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each engine that a row counts")
    parser.add_argument("--bound", type=float, default=0.97, help="of the ratio")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-mb", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a step may hold")
    args = parser.parse_args()
    method: Method = args.method
    runner, ready = load(args, method)
    limits = Limits(max_model_len=min(2048, ready.max_model_len), max_num_seqs=MOST_REQUESTS, max_num_batched_tokens=args.budget)
    clock = runner.clock = time.thread_time if args.threads == 1 else time.perf_counter
    tree = Tree(args.tree, args.tree_shape)
    drafts = SpeculationConfig(
        method=method, num_tokens=args.tokens, is_adaptive=args.control == "adaptive", drafts=frozenset({method}), tree=tree
    )
    sampling = sampling_of(json.loads(args.sampling))
    plain, ours = (
        Engine(Part(runner, part, PARTS, MOST_REQUESTS), limits, speculating, clock, sampling)
        for part, speculating in enumerate((SpeculationConfig(), drafts))
    )
    is_chat = "<|im_start|>" in (args.model / "tokenizer.json").read_text()
    print(f"| {' | '.join(HEADS)} |\n" + "|---" * len(HEADS) + "|", flush=True)
    limits_told, texts = list[str](), kinds_for(ready.max_model_len)
    for batch in args.batches:
        for kind in args.kinds:
            prompts = encoded(args.model, texts[kind], max(batch, len(texts[kind])), is_chat)
            sets = [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]
            pairs = take_turns(plain, ours, sets, args.pairs, args.max_tokens)
            print(row_of(kind, batch, pairs, args.bound), flush=True)
            if args.control == "fixed" and method != "ngram" and not args.tree and has_all(pairs):
                limits_told.append(f"{kind}, {batch}: {limit_of(pairs)}")
    print("", *limits_told, sep="\n")


if __name__ == "__main__":
    main()
