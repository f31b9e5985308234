"""Twelve loads, each with one known limit: how a service observes it, and the run with the advised change."""

import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median, quantiles
from typing import Any

import msgspec

from bench.router.replay import BLOCK_TOKENS, Arrival
from bench.simulate.machines import ANALYTIC
from phalanx_api.explain.findings import LimitCause
from phalanx_api.explain.steady import with_cheaper_kv
from phalanx_api.spec.inference_service import Spec
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.status import Status
from phalanx_api.summary import RouterSummary
from tests.bench.explain.runs import Fleet, ObservedWorld, even, poisson

INT8 = 1.94
"""Tokens that int8 pages hold, relative to 16-bit ones."""
START_S = 60.0
TOKEN_CPU_S = 1e-4
"""CPU time of a router per streamed token."""
ACCEPTED, DRAFT_S = 0.1, 0.008
"""Accepted draft tokens per step and request, and the time that a step with draft tokens takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """A load with one limit."""

    cause: LimitCause
    fleet: Fleet
    changed: Fleet
    advised: str
    measure: Callable[[ObservedWorld], float]
    spec: Spec
    status: Status
    summaries: Callable[[ObservedWorld], list[RouterSummary]] = lambda world: [world.summary()]


def make_spec(**fields: Any) -> Spec:
    return Spec.model_validate({"model": {"uri": "hf://org/model"}} | fields)


def median_ttft_s(world: ObservedWorld) -> float:
    return median(world.ttfts_s(world.fleet.measured_from_s, world.fleet.measured_to_s))


def p95_ttft_s(world: ObservedWorld) -> float:
    return quantiles(world.ttfts_s(world.fleet.measured_from_s, world.fleet.measured_to_s), n=20)[-1]


def with_prefixes(rate: float, until_s: float, prefixes: int, tail: int, output: int) -> list[Arrival]:
    """Returns prompts of one of some prefixes of four blocks, and a tail of their own."""
    rng, at_s, arrivals = random.Random(1), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        first = 4 * rng.randrange(prefixes)
        arrivals.append(Arrival(at_s, 4 * BLOCK_TOKENS + tail, output, tuple(range(first, first + 4))))
    return arrivals


def router_cpu(world: ObservedWorld, routers: int) -> list[float]:
    """CPU shares of the routers, whose streams are those of every n-th group."""
    span_s = world.fleet.measured_to_s - world.fleet.measured_from_s
    used = [0.0] * routers
    for step in world.measured_steps():
        used[step.group % routers] += step.decodes * TOKEN_CPU_S
    return [used_s / span_s for used_s in used]


def drafting(world: ObservedWorld) -> list[RouterSummary]:
    """Returns the summary of groups that speculate: the cost model is that of steps without draft tokens."""
    summary = world.summary()
    plain_s, draft_s = world.itl_s() - DRAFT_S, world.itl_s()
    speedup = (1 + ACCEPTED) * plain_s / draft_s
    counts = SpeculationCounts(paths=1000, drafted=[1000], accepted=[round(1000 * ACCEPTED)], saved=100, draft_s=DRAFT_S * 1000)
    plain = [float(number) for number in astuple(ANALYTIC)]
    groups = [msgspec.structs.replace(group, speedup=speedup, speculation=counts, step_model=plain) for group in summary.groups]
    return [msgspec.structs.replace(summary, groups=groups, itl=world.itl_histogram(1 / (1 + ACCEPTED)))]


def _case(
    cause: LimitCause,
    fleet: Fleet,
    advised: str,
    measure: Callable[[ObservedWorld], float],
    change: dict[str, Any],
    **others: Any,
) -> LoadCase:
    defaults: dict[str, Any] = {"spec": make_spec(), "status": Status()}
    return LoadCase(
        cause=cause, fleet=fleet, changed=replace(fleet, **change), advised=advised, measure=measure, **(defaults | others)
    )


def _itl(world: ObservedWorld) -> float:
    return world.itl_s()


def _output(world: ObservedWorld) -> float:
    return world.tokens_per_s()


def _steps() -> Sequence[LoadCase]:
    contexts = replace(ANALYTIC, context_s=1e-6)
    long: dict[str, Any] = {"observed_s": 300.0, "measured_from_s": 200.0, "measured_to_s": 400.0}
    attention = Fleet(arrivals=even(1.3, 400, 500, 1000), groups=2, model=contexts, **long)
    int8 = {"model": with_cheaper_kv(contexts, 1 / INT8), "tokens": int(attention.tokens * INT8)}
    prefill = Fleet(arrivals=poisson(5.2, 300, 2000, 50), groups=2, measured_to_s=300)
    slower = replace(ANALYTIC, fixed_s=ANALYTIC.fixed_s + DRAFT_S)
    arrivals = poisson(8, 180, 100, 200)
    shorter = [replace(arrival, output_tokens=round(arrival.output_tokens / (1 + ACCEPTED))) for arrival in arrivals]
    draft = {"method": "NGram"}
    return [
        _case("weights", Fleet(arrivals=arrivals, groups=4), "spec.replicas", _itl, {"groups": 3}),
        _case("attention", attention, "spec.engine.kvCacheDtype", _itl, int8),
        _case("prefill", prefill, "spec.replicas", _itl, {"groups": 3}),
        _case(
            "speculation",
            Fleet(arrivals=shorter, groups=4, model=slower),
            "spec.engine.speculative.method",
            _itl,
            {"arrivals": arrivals, "model": ANALYTIC},
            spec=make_spec(engine={"speculative": draft}),
            summaries=drafting,
        ),
    ]


def _capacity() -> Sequence[LoadCase]:
    prefixes = Fleet(arrivals=with_prefixes(2.5, 180, 40, 200, 20), tokens=50_000)
    return [
        _case(
            "queue",
            Fleet(arrivals=poisson(6, 180, 50, 200), max_num_seqs=8),
            "spec.engine.maxNumSeqs",
            _output,
            {"max_num_seqs": 16},
        ),
        _case(
            "kv",
            Fleet(arrivals=poisson(6, 180, 300, 400), tokens=16_000),
            "spec.engine.kvCacheDtype",
            _output,
            {"tokens": int(16_000 * INT8)},
        ),
        _case(
            "prefix",
            prefixes,
            "spec.engine.hostCacheMemory",
            lambda world: world.hit_rate(),
            {"tokens": 2 * prefixes.tokens},
            summaries=lambda world: [world.summary(world.curve())],
        ),
        _case("surplus", Fleet(arrivals=poisson(0.9, 180, 100, 100), groups=6), "spec.replicas", _itl, {"groups": 2}),
    ]


def _fleet() -> Sequence[LoadCase]:
    arrivals = poisson(8, 180, 100, 200)
    many = Fleet(arrivals=poisson(40, 130, 100, 200), groups=4, measured_to_s=120)
    scaling = {
        "minReplicas": 0, "maxReplicas": 4, "targets": {"ttftP95Ms": 2000}, "scaleToZero": {"enabled": True}
    }  # fmt: skip
    woken = Status.model_validate(
        {
            "autoscaling": {
                "coldStartSeconds": START_S,
                "history": [{"time": "2026-01-01T00:00:00Z", "before": 0, "after": 1, "reason": "Wake"}],
            }
        }
    )

    def busy_router(world: ObservedWorld) -> list[RouterSummary]:
        return [msgspec.structs.replace(world.summary(), cpu_share=router_cpu(world, 1)[0])]

    cold = Fleet(arrivals=poisson(1, 180, 200, 100), opens_s=START_S, observed_s=90, measured_to_s=90)
    return [
        _case(
            "straggler",
            Fleet(arrivals=arrivals, groups=4, slow=(0, 2.0, 10.0)),
            "kubectl phalanx drain",
            lambda world: world.itl_s(0),
            {"slow": None},
        ),
        _case(
            "router_cpu",
            many,
            "spec.router.replicas",
            lambda world: router_cpu(world, 2)[0],
            {},
            summaries=busy_router,
        ),
        _case(
            "network",
            Fleet(arrivals=poisson(8, 180, 200, 100), groups=2, link_s=0.06),
            "spec.placement.nodeSelector",
            median_ttft_s,
            {"link_s": 0.001},
        ),
        _case(
            "cold_start",
            cold,
            "spec.autoscaling.minReplicas",
            p95_ttft_s,
            {"opens_s": 0.0, "measured_to_s": 180.0},
            spec=make_spec(autoscaling=scaling),
            status=woken,
        ),
    ]


CASES = {case.cause: case for case in (*_steps(), *_capacity(), *_fleet())}
