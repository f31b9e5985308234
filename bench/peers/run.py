"""One engine through the workloads: runs with prompts of their own, then one more while memory is sampled."""

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.engine.serve import Load, run_load
from bench.frame.client import Answer
from bench.frame.figures import percentile
from bench.frame.programs import Program
from bench.peers.engines import Machine, Peer
from bench.peers.memory import pool_bytes, sampled
from bench.peers.workloads import NAMES, WorkloadName, workload

Figures = dict[str, float]
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Runs of each workload, cut short in a trial, and seconds that an engine may take after its start."""

    runs: int = 3
    is_trial: bool = False
    seconds: float = 1500.0


def measured(peer: Peer, machine: Machine, limits: Limits) -> dict[str, object]:
    """The engine's row: medians by workload, memory and start. What fails is told under `failed`, with what came before it."""
    row: dict[str, object] = {"engine": peer.name, "weights": peer.weights}
    began = time.monotonic()
    try:
        with peer.start(machine) as program:
            row["start_s"] = time.monotonic() - began
            deadline = time.monotonic() + limits.seconds
            ask = partial(asked, peer, program, deadline, limits.is_trial)
            ask("W1", -1)  # warm
            for name in NAMES:
                runs = [figures_of(*ask(name, run)) for run in range(limits.runs)]
                row[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"runs": runs}
            row["memory"] = _memory(peer, program, ask)
    except (RuntimeError, OSError, TimeoutError) as error:
        row["failed"] = f"{type(error).__name__}: {error}"[-2000:]
    return row


def asked(
    peer: Peer, program: Program, deadline: float, is_trial: bool, name: WorkloadName, run: int
) -> tuple[list[Answer], float]:
    """All answers and the seconds they took. Raises RuntimeError when one is short or missing, TimeoutError past the deadline."""
    whole = workload(name, run)
    work = whole.trial() if is_trial else whole
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the time of this engine was over before {name}")
    bodies = [_body(peer, prompt, count) for prompt, count in zip(work.prompts, work.max_tokens, strict=True)]
    url = f"{program.base_url}/v1/completions"
    load = Load(url, bodies, work.concurrency, timeout_s=None, is_kept_alive=False)  # some engines close what they answered on
    try:
        answers, seconds = asyncio.run(asyncio.wait_for(run_load(load), left))
    except TimeoutError:
        raise TimeoutError(f"the time of this engine was over in {name}") from None
    for answer, wanted in zip(answers, work.max_tokens, strict=True):
        if answer.error is not None or answer.completion_tokens != wanted:
            raise RuntimeError(answer.error or f"{answer.completion_tokens} tokens of {wanted}")
    return answers, seconds


def _body(peer: Peer, prompt: list[int], max_tokens: int) -> dict[str, object]:
    return {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **peer.extra,
    }


def figures_of(answers: list[Answer], seconds: float) -> Figures:
    """Tokens per second, and milliseconds to the first token and between tokens."""
    ttft = [answer.ttft_s * _MS for answer in answers]
    gaps = [gap * _MS for answer in answers for gap in answer.gaps_s]
    tpot = statistics.median(answer.tpot_s or 0 for answer in answers)
    return {
        "tokens_per_s": sum(answer.completion_tokens for answer in answers) / seconds,
        "decode_tokens_per_s": 1 / tpot if tpot else math.nan,  # answers that come whole tell nothing
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
    }


def _memory(peer: Peer, program: Program, ask: Callable[[WorkloadName, int], object]) -> Figures:
    """PSS of all its processes at the peak of W2 and W4, and what of it is neither weights nor KV pool."""
    with sampled(program.process.pid) as peak:
        ask("W2", 99)
        ask("W4", 99)
        pool = pool_bytes(program.process.pid, peer.kv_bytes)
    return {"peak_bytes": peak.pss_bytes, "pool_bytes": pool, "other_bytes": peak.pss_bytes - peer.weight_bytes - pool}
