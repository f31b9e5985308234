"""Measures pulls of prefixes between engines: two routers over the same engines, one of which pulls, in interleaved pairs.

    python -m bench.moves.pulls [MODEL] [--groups 4] [--trials 10] [--prompt 1536] [--dtype float32] [--json FILE]

A trial sends one prompt through each router, the order alternates; a salt keeps their pages apart. Its first request leaves the
prefix in one group, the next ones, with other ends, go to the other groups in turn. Reported are the times to their first tokens,
the median of the ratios of equal prompts with its interval, and the prompt tokens that groups computed. Exits with 1 if an output
differs between the routers or no prefix was pulled.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.frame.figures import median_interval, percentile
from bench.moves.through_router import TOKEN, engines
from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import Delta
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import FleetSettings

END_TOKENS, OUTPUT_TOKENS = 24, 4
SETTLE_S = 10.0
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 8192}
"""Of the default model: large enough that a prompt takes a while, small enough for four engines on one machine."""


@dataclass(slots=True)
class Side:
    """One of the two routers."""

    name: str
    fleet: RouterBackend
    registry: CollectorRegistry
    ttfts_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    computed: int = 0

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def trial(self, prefix: list[int], ends: Sequence[list[int]]) -> None:
        """Sends the prefix with each end, the first one without measuring it."""
        before = self._prompt_tokens()
        for number, end in enumerate(ends):
            ttft_s, tokens = await self._send(prefix + end)
            self.outputs.append(tokens)
            if number:
                self.ttfts_s.append(ttft_s)
            else:
                await self._wait_for_keys(prefix)
                before = self._prompt_tokens()
        await asyncio.sleep(0.2)  # for the last load reports
        self.computed += self._prompt_tokens() - before

    async def _send(self, prompt: list[int]) -> tuple[float, list[int]]:
        sampling = wire.Sampling(max_tokens=OUTPUT_TOKENS, seed=7, temperature=0.0)
        request = wire.Request(id=self.name, epoch=0, prompt=prompt, delivered=[], sampling=sampling, cache_salt=self.name)
        started, ttft_s, tokens = time.perf_counter(), 0.0, []
        async for item in self.fleet.generate(request):
            if isinstance(item, Delta) and item.tokens:
                ttft_s = ttft_s or time.perf_counter() - started
                tokens += item.tokens
        return ttft_s, tokens

    async def _wait_for_keys(self, prefix: list[int]) -> None:
        deadline = time.perf_counter() + SETTLE_S
        while not self.fleet.links.fleet_view.prefixes.hits(PromptKeys(prefix, "", self.name)):
            if time.perf_counter() > deadline:
                raise TimeoutError("no group reports the prefix")
            await asyncio.sleep(0.01)

    def _prompt_tokens(self) -> int:
        """Prompt tokens that groups had to compute so far, by their last reports."""
        loads = [link.group_report.load for link in self.fleet.links.open_links()]
        return sum(load.prefix_queried_tokens - load.prefix_hit_tokens for load in loads if load is not None)

    def figures(self) -> dict[str, object]:
        return {
            "requests": len(self.ttfts_s),
            "TTFT p50, ms": round(1e3 * percentile(self.ttfts_s, 50), 1),
            "TTFT p99, ms": round(1e3 * percentile(self.ttfts_s, 99), 1),
            "prompt tokens computed": self.computed,
            "pulls": int(self.metric("phalanx_router_pulls_total", outcome="pulled")),
            "tokens pulled": int(self.metric("phalanx_router_pull_tokens_total")),
            "bytes pulled": int(self.metric("phalanx_router_pull_bytes_total")),
            "seconds of pulls": round(self.metric("phalanx_router_pull_seconds_sum"), 3),
        }


def make_side(name: str, pulls: bool) -> Side:
    registry = CollectorRegistry()
    policy = BalancePolicy(mode="Off", routing="RoundRobin", pull_prefixes=pulls)
    settings = FleetSettings(link=LinkSettings(token=ServiceToken([TOKEN]), router=name), policy=policy)
    return Side(name, RouterBackend(settings, RouterMetrics(registry)), registry)


async def run_bench(addresses: Sequence[str], trials: int, prompt_tokens: int, seed: int) -> tuple[Side, Side]:
    sides = make_side("pulls", True), make_side("computes", False)
    tasks = [asyncio.create_task(side.fleet.run(StaticLeaders(addresses))) for side in sides]
    rng = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    try:
        for side in sides:
            while side.fleet.links.num_ready < len(addresses):
                await asyncio.sleep(0.05)
        for number in range(trials + 1):
            prefix, ends = draw(prompt_tokens), [draw(END_TOKENS) for _ in addresses]
            for side in sides if number % 2 else reversed(sides):
                await side.trial(prefix, ends)
            if not number:  # fits the step models
                for side in sides:
                    side.ttfts_s.clear()
                    side.computed = 0
        return sides
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m bench.moves.pulls", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("model", type=Path, nargs="?", help="a model folder (default: a small random one)")
    flags.add_argument("--groups", type=int, default=4)
    flags.add_argument("--trials", type=int, default=10)
    flags.add_argument("--prompt", type=int, default=1536, help="tokens of the prefix")
    flags.add_argument("--dtype", default="float32")
    flags.add_argument("--kv-cache-memory-bytes", default="256000000")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, default=None, help="file for the figures as JSON")
    args = flags.parse_args(argv)
    from tests.runtime.tiny import save_tiny

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or save_tiny(folder / "small", **SIZES)
        more = ("--kv-cache-memory-bytes", args.kv_cache_memory_bytes)
        programs = stack.enter_context(engines(model, args.groups, args.dtype, folder, more))
        addresses = [program.base_url.removeprefix("http://") for program in programs]
        sides = asyncio.run(run_bench(addresses, args.trials, args.prompt, args.seed))
    figures = {side.name: side.figures() for side in sides}
    for name in figures["pulls"]:
        print(f"{name:24} {figures['pulls'][name]!s:>14} {figures['computes'][name]!s:>14}")
    ratio = median_interval([pulled / computed for pulled, computed in zip(*(side.ttfts_s for side in sides), strict=True)])
    print(f"TTFT, pulled / computed: {ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.num_pairs} pairs)")
    if args.json is not None:
        args.json.write_text(json.dumps(figures | {"TTFT ratio": asdict(ratio)}, indent=2))
    is_equal = sides[0].outputs == sides[1].outputs
    if not is_equal:
        print("outputs differ between the routers", file=sys.stderr)
    return 0 if is_equal and figures["pulls"]["pulls"] else 1


if __name__ == "__main__":
    sys.exit(main())
