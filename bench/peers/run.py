"""Runs one engine through the workloads: runs with different prompts, then one that samples memory."""

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
from bench.peers.memory import pool_bytes, sampled_peak
from bench.peers.workloads import NAMES, Workload, WorkloadName, workload

Figures = dict[str, float]
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Limits:
    runs: int = 3  # of each workload
    is_trial: bool = False
    seconds: float = 1500.0  # after the start


def measure(peer: Peer, machine: Machine, limits: Limits) -> dict[str, object]:
    """Returns the engine's row: medians by workload, memory and start time; `failed` has the reason of a failure."""
    row: dict[str, object] = {"engine": peer.name, "weights": peer.weights}
    started = time.monotonic()
    try:
        with peer.start(machine) as program:
            row["start_s"] = time.monotonic() - started
            deadline = time.monotonic() + limits.seconds
            send = partial(send_workload, peer, program, deadline, limits.is_trial)
            send("W1", -1)  # warm
            for name in NAMES:
                runs = [figures_of(*send(name, run)) for run in range(limits.runs)]
                row[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"runs": runs}
            row["memory"] = _memory(peer, program, send)
    except (RuntimeError, OSError, TimeoutError) as error:
        row["failed"] = f"{type(error).__name__}: {error}"[-2000:]
    return row


def send_workload(
    peer: Peer, program: Program, deadline: float, is_trial: bool, name: WorkloadName, run: int
) -> tuple[list[Answer], float]:
    """Sends a workload; returns all answers and the duration.

    Raises RuntimeError if an answer is short or missing, TimeoutError past the deadline.
    """
    full = workload(name, run)
    return send_requests(peer, program, deadline, full.trial() if is_trial else full, name)


def send_requests(peer: Peer, program: Program, deadline: float, load: Workload, name: str) -> tuple[list[Answer], float]:
    """Sends the requests of a workload; returns and raises as `send_workload`. `name`: for errors."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError(f"timeout before {name}")
    bodies = [_body(peer, prompt, count) for prompt, count in zip(load.prompts, load.max_tokens, strict=True)]
    url = f"{program.base_url}/v1/completions"
    requests = Load(url, bodies, load.concurrency, timeout_s=None, is_kept_alive=False)  # some engines close connections
    try:
        answers, seconds = asyncio.run(asyncio.wait_for(run_load(requests), remaining_s))
    except TimeoutError:
        raise TimeoutError(f"timeout in {name}") from None
    for answer, num_tokens in zip(answers, load.max_tokens, strict=True):
        if answer.error is not None or answer.completion_tokens != num_tokens:
            raise RuntimeError(answer.error or f"{answer.completion_tokens} tokens of {num_tokens}")
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
    ttft = [answer.ttft_s * _MS for answer in answers]
    gaps = [gap * _MS for answer in answers for gap in answer.gaps_s]
    tpot = statistics.median(answer.tpot_s or 0 for answer in answers)
    return {
        "tokens_per_s": sum(answer.completion_tokens for answer in answers) / seconds,
        "decode_tokens_per_s": 1 / tpot if tpot else math.nan,  # not measurable without streaming
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
    }


def _memory(peer: Peer, program: Program, send: Callable[[WorkloadName, int], object]) -> Figures:
    """Returns the peak PSS of all processes in W2 and W4, and the part that is neither weights nor KV pool."""
    with sampled_peak(program.process.pid) as peak:
        send("W2", 99)
        send("W4", 99)
        pool = pool_bytes(program.process.pid, peer.kv_bytes)
    return {"peak_bytes": peak.pss_bytes, "pool_bytes": pool, "other_bytes": peak.pss_bytes - peer.weight_bytes - pool}
