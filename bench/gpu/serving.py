"""Measures the product's programs: `phalanx-runtime serve`, routers before it, and client processes.

trace    TTFT and ITL under a conversation trace at 80 % of the capacity; capacity: completed requests per second when all wait
router   many short requests: p99 of the whole answer, and the program that limits it
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.frame.figures import percentile
from bench.frame.programs import Program, cpu_s, descendants, running
from bench.gpu.bounds import MAX_P99_MS, Figure, limit_of
from bench.gpu.open_loop import Sent, conversation, paced, send_all, steady
from bench.gpu.random_model import write_checkpoint
from bench.gpu.sizes import Config
from bench.gpu.steps import Bench

SHARE_OF_CAPACITY = 0.8
PROMPT, OUTPUT = 32, 16
"""Tokens of the short requests."""
RANK = b"phalanx_runtime.rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A group and its routers."""

    group: Program
    routers: Sequence[Program]

    @property
    def urls(self) -> list[str]:
        """Completions of each router."""
        return [f"{router.base_url}/v1/completions" for router in self.routers]

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each program so far; the rank apart from the group's HTTP server."""
        ranks = sum(cpu_s(pid) for pid in descendants(self.group.process.pid) if RANK in _command(pid))
        used = {"rank: engine loop and device": ranks, "HTTP server of the group": self.group.cpu_s() - ranks}
        return used | {f"router {number}": router.cpu_s() for number, router in enumerate(self.routers)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def running_fleet(bench: Bench, config: Config, num_routers: int) -> Iterator[Fleet]:
    """Runs a group of one rank with random weights, and routers."""
    sizes = bench.sizes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text("token of the bench")
        model = write_checkpoint(folder / "model", config, sizes.dtype, bench.device)
        secret = ["--token-file", str(folder / "token")]
        flags = ["--max-num-seqs", str(sizes.max_num_seqs), "--max-num-batched-tokens", str(sizes.prefill)]
        flags += ["--kv-cache-memory-bytes", str(sizes.served_kv_bytes), "--async-scheduling", "--max-num-queued-reqs", "16384"]
        arguments = ["serve", str(model), "--served-model-name", "bench", *secret, *flags]
        group = stack.enter_context(running("group", "phalanx_runtime", arguments, folder))
        leader = group.base_url.removeprefix("http://")
        router_flags = ["serve", "--leaders", leader, "--max-queued", "16384", *secret]
        names = [f"router {number}" for number in range(num_routers)]
        yield Fleet(
            group=group, routers=[stack.enter_context(running(name, "phalanx_router", router_flags, folder)) for name in names]
        )


def trace_figures(bench: Bench) -> Iterator[Figure]:
    """TTFT and ITL at 80 % of the capacity, without bounds."""
    with running_fleet(bench, bench.sizes.served, 1) as fleet:
        yield from measure_trace(bench, fleet)


def measure_trace(bench: Bench, fleet: Fleet) -> Iterator[Figure]:
    """Measures a running fleet. Raises RuntimeError if a request fails."""
    sizes, vocab_size = bench.sizes, int(bench.sizes.served["vocab_size"])
    arrivals, name = conversation(sizes.trace_requests, sizes.max_prompt)
    send_all(fleet.urls, [replace(one, at_s=0.0) for one in arrivals[:4]], vocab_size, 1)  # warm
    at_once = [replace(one, at_s=0.0) for one in arrivals]
    capacity = len(at_once) / _checked(send_all(fleet.urls, at_once, vocab_size, sizes.clients)).seconds
    rate = SHARE_OF_CAPACITY * capacity
    sent = _checked(send_all(fleet.urls, paced(arrivals, rate), vocab_size, sizes.clients))
    yield Figure(name=f"capacity ({name})", value=capacity, unit="requests/s")
    yield Figure(name="sent", value=rate, unit="requests/s")
    yield from latencies(sent)


def router_figures(bench: Bench) -> Iterator[Figure]:
    """Short requests through routers: p50 and p99, with a bound or the limit."""
    with running_fleet(bench, bench.sizes.fast, bench.sizes.routers) as fleet:
        yield from measure_load(bench, fleet)


def measure_load(bench: Bench, fleet: Fleet) -> Iterator[Figure]:
    """Measures a running fleet. Raises RuntimeError if a request fails."""
    sizes, vocab_size = bench.sizes, int(bench.sizes.fast["vocab_size"])
    send_all(fleet.urls, steady(max(1.0, sizes.rate / 4), 1.0, PROMPT, OUTPUT, seed=1), vocab_size, sizes.clients)  # warm
    before = fleet.cpu()
    sent = _checked(send_all(fleet.urls, steady(sizes.rate, sizes.load_s, PROMPT, OUTPUT), vocab_size, sizes.clients))
    shares = _shares(before, fleet.cpu(), sent)
    p99_ms = 1e3 * percentile([answer.e2e_s for answer in sent.answers], 99)
    yield Figure(name="sent", value=len(sent.answers) / sizes.load_s, unit="requests/s")
    yield Figure(name="answered", value=len(sent.answers) / sent.seconds, unit="requests/s")
    yield Figure(
        name=f"{PROMPT} in, {OUTPUT} out, p99 of the answer",
        value=p99_ms,
        unit="ms",
        bound=sizes.bound(MAX_P99_MS),
        is_least=False,
        limit=limit_of(shares),
    )
    yield from latencies(sent)
    for name, share in shares.items():
        yield Figure(name=f"CPU, {name}", value=share, unit="s/s")
    yield Figure(name="latest request behind its time", value=1e3 * sent.late_s, unit="ms")


def _shares(before: Mapping[str, float], after: Mapping[str, float], sent: Sent) -> dict[str, float]:
    """CPU seconds per second of each program, and of the busiest client."""
    used = {name: (after[name] - before[name]) / sent.seconds for name in after}
    return used | {"client": sent.cpu_s / sent.seconds}


def latencies(sent: Sent) -> Iterator[Figure]:
    """P50 and p99 of TTFT, ITL and whole answers."""
    values = {
        "TTFT": [answer.ttft_s for answer in sent.answers],
        "ITL": [gap for answer in sent.answers for gap in answer.gaps_s],
        "answer": [answer.e2e_s for answer in sent.answers],
    }
    for name, seconds in values.items():
        for percent in (50, 99):
            yield Figure(name=f"{name} p{percent}", value=1e3 * percentile(seconds, percent), unit="ms")


def _checked(sent: Sent) -> Sent:
    errors = sorted({answer.error for answer in sent.answers if answer.error is not None})
    if errors:
        failed = sum(answer.error is not None for answer in sent.answers)
        raise RuntimeError(f"{failed} of {len(sent.answers)} requests failed: {'; '.join(errors)[:500]}")
    return sent
