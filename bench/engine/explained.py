"""Compares what `kubectl phalanx explain` predicts with real engines: four loads with one known limit each.

    python -m bench.engine.explained [--loads queue kv surplus prefix] [--seconds 65]

Each load runs twice, the second time with the advised change. Requests arrive at random, whether others have ended or not. The
router's summary after the first run is explained; the limit must be named first, and the predicted value of its metric must be
within 20 % of what the second run measures:

    queue         two requests run at once, more wait             output tokens/s with four
    kv            pages of two requests, more wait                output tokens/s with int8 pages
    surplus       two groups for the load of one                  mean time between tokens with one group
    prefix        prefixes of twice the pages                     hit rate with as much host memory

Engines have a lower priority than router and clients, which have cores of their own in a cluster. `--seconds` must exceed a
minute, the window of the summary. Exits with 1 if a limit is not named or a prediction misses.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.figures import table
from bench.frame.programs import Program, running
from bench.moves.relief import NICENESS, save_small
from phalanx_api.explain.explain import explain
from phalanx_api.explain.findings import Finding, LimitCause
from phalanx_api.spec.inference_service import Spec
from phalanx_api.status import Status
from phalanx_api.summary import SNAPSHOT_PATH, RouterSummary

TOLERANCE = 0.2
PREFIX_TOKENS, NUM_PREFIXES = 256, 32
PAGE_BYTES = 65_536
"""Of the model of `save_small` in float32, 16 tokens."""
TOKEN = "of the bench"


@dataclass(frozen=True, slots=True)
class Measured:
    """A run: the router's summary at its end, and the answers of its last half."""

    summary: RouterSummary
    answers: Sequence[Answer]
    seconds: float

    def tokens_per_s(self) -> float:
        """Output of answers that ended in the last half."""
        return sum(answer.completion_tokens for answer in self.answers) / (self.seconds / 2)

    def itl_s(self) -> float:
        """Mean time between tokens."""
        times = [answer.tpot_s for answer in self.answers if answer.tpot_s is not None]
        return sum(times) / max(1, len(times))

    def host_hit_rate(self) -> float:
        """Hit rate of page lookups, counted with host memory."""
        return max((group.cache_curve.tiers.host or 0.0 for group in self.summary.groups), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealLoad:
    """A load with one limit. `changed`: flags of the groups with the advised change."""

    cause: LimitCause
    advised: str
    rate: float
    output: int
    measure: Callable[[Measured], float]
    flags: Sequence[str] = ()
    changed: Sequence[str] = ()
    groups: int = 1
    changed_groups: int = 1
    has_prefixes: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict)


_TWO_REQUESTS = ("--kv-cache-memory-bytes", str(8 * PAGE_BYTES // 2), "--max-model-len", "128", "--dtype", "bfloat16")
_SMALL_POOL = ("--kv-cache-memory-bytes", str(NUM_PREFIXES * PREFIX_TOKENS // 16 // 2 * PAGE_BYTES))
LOADS: Mapping[str, RealLoad] = {
    load.cause: load
    for load in (
        RealLoad(
            cause="queue",
            advised="spec.engine.maxNumSeqs",
            rate=10.0,
            output=64,
            measure=Measured.tokens_per_s,
            flags=("--max-num-seqs", "2"),
            changed=("--max-num-seqs", "4"),
            spec={"engine": {"maxNumSeqs": 2}},
        ),
        RealLoad(
            cause="kv",
            advised="spec.engine.kvCacheDtype",
            rate=14.0,
            output=64,
            measure=Measured.tokens_per_s,
            flags=_TWO_REQUESTS,
            changed=(*_TWO_REQUESTS, "--kv-cache-dtype", "int8"),
        ),
        RealLoad(
            cause="surplus",
            advised="spec.replicas",
            rate=1.0,
            output=64,
            measure=Measured.itl_s,
            groups=2,
            spec={"replicas": 2},
        ),
        RealLoad(
            cause="prefix",
            advised="spec.engine.hostCacheMemory",
            rate=8.0,
            output=2,
            measure=Measured.host_hit_rate,
            flags=_SMALL_POOL,
            changed=(*_SMALL_POOL, "--host-cache-memory", _SMALL_POOL[1]),
            has_prefixes=True,
        ),
    )
}


def body(load: RealLoad, draw: random.Random) -> dict[str, object]:
    """Returns a request: a prompt of its own, after one of the shared prefixes if the load has them."""
    prefix = draw.randrange(NUM_PREFIXES)
    shared = [1 + (prefix * 7 + i * 3) % 250 for i in range(PREFIX_TOKENS)] if load.has_prefixes else []
    shared[:16] = [1 + prefix] * min(16, len(shared))
    own = [draw.randrange(256) for _ in range(32)]
    limits = {"max_tokens": load.output, "temperature": 0.0, "ignore_eos": True}
    return {"prompt": shared + own, "stream": True, "stream_options": {"include_usage": True}} | limits


async def send(load: RealLoad, router: Program, seconds: float) -> Measured:
    """Sends requests for these seconds, and returns what was measured before the open ones are cancelled."""
    draw, loop, tasks = random.Random(1), asyncio.get_running_loop(), set[asyncio.Task[Answer]]()
    begin = loop.time()
    async with session_for(100_000, None, 10 * seconds) as session:
        url = f"{router.base_url}/v1/completions"
        while loop.time() < begin + seconds:
            tasks.add(asyncio.create_task(stream_answer(session, url, body(load, draw))))
            await asyncio.sleep(draw.expovariate(load.rate))
        summary = await asyncio.to_thread(read_summary, router)
        done = [task.result() for task in tasks if task.done()]
        half = max((answer.ended for answer in done), default=0.0) - seconds / 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed := [answer.error for answer in done if answer.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return Measured(summary, [answer for answer in done if answer.ended >= half], seconds)


def read_summary(router: Program) -> RouterSummary:
    """Returns what `explain` reads."""
    snapshot = httpx.post(f"{router.base_url}{SNAPSHOT_PATH}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)
    return msgspec.json.decode(snapshot.content, type=RouterSummary)


def run(load: RealLoad, model: Path, folder: Path, seconds: float, is_changed: bool) -> Measured:
    """Runs groups, a router and the load once."""
    (folder / "token").write_text(TOKEN)
    secret = ["--token-file", str(folder / "token")]
    flags = ["--max-num-batched-tokens", "256", *(load.changed if is_changed else load.flags)]
    if "--kv-cache-memory-bytes" not in flags:
        flags += ["--kv-cache-memory-bytes", str(1024 * PAGE_BYTES)]
    with ExitStack() as stack:
        arguments = ["serve", str(model), *secret, *flags]
        niced = ["nice", "-n", str(NICENESS)]
        groups = [
            stack.enter_context(running(f"group-{number}", "phalanx_runtime", arguments, folder, before=niced))
            for number in range(load.changed_groups if is_changed else load.groups)
        ]
        leaders = ",".join(group.base_url.removeprefix("http://") for group in groups)
        arguments = ["serve", *secret, "--leaders", leaders, "--max-queued", "100000"]
        router = stack.enter_context(running("router", "phalanx_router", arguments, folder))
        return asyncio.run(send(load, router, seconds))


def first_finding(load: RealLoad, measured: Measured) -> Finding | None:
    """Returns the first finding of a run, and prints all."""
    spec = Spec.model_validate({"model": {"uri": "hf://org/model"}} | dict(load.spec))
    explanation = explain([measured.summary], spec, Status())
    print(f"{load.cause}: {explanation.state}", file=sys.stderr)
    for finding in explanation.findings:
        print(f"    {finding.cause}: {finding.text}", file=sys.stderr)
    return explanation.findings[0] if explanation.findings else None


def compare(load: RealLoad, play: Callable[[bool], Measured]) -> list[str]:
    """Returns the row of a load. `play` runs it; true: with the advised change."""
    finding = first_finding(load, play(False))
    after = load.measure(play(True))
    if finding is None or (finding.cause, finding.advice.field) != (load.cause, load.advised) or finding.effect is None:
        return [load.cause, finding.cause if finding else "nothing", "", "", f"{after:.4g}", "NO"]
    effect = finding.effect
    is_near = abs(effect.after - after) <= TOLERANCE * after
    numbers = [f"{value:.4g}" for value in (effect.before, effect.after, after)]
    return [load.cause, effect.metric, *numbers, "yes" if is_near else "NO"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=65.0)
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_small(Path(folder) / "small")
        for name in options.loads:
            rows.append(compare(LOADS[name], partial(run, LOADS[name], model, Path(folder), options.seconds)))
    print(table(["load", "metric", "before", "predicted", "measured", f"within {TOLERANCE:.0%}"], rows))
    return int(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
