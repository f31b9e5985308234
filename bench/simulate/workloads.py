"""Loads and fleets, and the policies that run on each.

A  conversations (Azure)                    B  long prompts with common prefixes (Mooncake)
C  long answers in bursts, few pages        D  A with one group at half speed
E  A with reports of different age          S  A at an oscillating rate, with autoscaling
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.machines import ITL_TARGET_S, SCARCE_TOKENS, TOKENS, TTFT_TARGET_S, Machine, scale_load
from bench.simulate.policies.chwbl import BoundedHash
from bench.simulate.policies.dynamo import OverlapAndLoad
from bench.simulate.policies.llmd import Scorers
from bench.simulate.policies.llumnix import Freeness
from bench.simulate.policies.lmetric import NewTokensTimesBatch
from bench.simulate.policies.others import LeastRequests, RoundRobin, TwoChoices
from bench.simulate.policies.ours import Ours
from bench.simulate.policy import Policy
from bench.simulate.scaling import Scaling
from bench.simulate.traffic import azure, jittered, mooncake, reasoning, repeat, shifted, speed_up, waves
from bench.simulate.world import Setting
from phalanx_api.summary import BalancePolicy

LETTERS = "ABCDES"
GROUPS = 8
REASONING_RATE = 7.2
"""Rate (requests/s) at which the tokens just fit into the pages of eight groups."""
REPORT_INTERVALS_S = (0.05, 0.25, 1.0, 5.0)
WAVE_RATES, WAVE_PERIOD_S = (1.0, 4.5), 1200.0
"""Range of the rate relative to the Azure trace's own, and the period."""
MIN_GROUPS, MEAN_GROUPS = 2, 6
"""Minimum groups of the scaled fleet, and the size of a fixed fleet of about equal cost."""

MakePolicy = Callable[[Shape, int], Policy]
"""Creates a policy for this many groups of this shape."""


@dataclass(frozen=True, slots=True)
class Run:
    workload: str
    policy: str
    make_policy: MakePolicy
    setting: Setting
    arrivals: Callable[[], list[Arrival]]


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    traces: Path
    machine: Machine
    seed: int = 0
    share: float = 1.0
    start_s: float = 60.0


def _ours(shape: Shape, groups: int, mode: str = "Migrate", has_ledger: bool = True) -> Policy:
    policy = BalancePolicy(mode=mode, ttft_target_s=TTFT_TARGET_S, itl_target_s=ITL_TARGET_S)  # type: ignore[arg-type]
    return Ours(shape, groups, policy, has_ledger)


def _factory(kind: Callable[[], Policy]) -> MakePolicy:
    return lambda shape, groups: kind()


PEERS: Mapping[str, MakePolicy] = {
    "round robin": _factory(RoundRobin),
    "two choices": _factory(TwoChoices),
    "least requests": _factory(LeastRequests),
    "CHWBL": _factory(BoundedHash),
    "llm-d 2:1:1": _factory(Scorers),
    "LMetric": _factory(NewTokensTimesBatch),
    "Dynamo cost": _factory(OverlapAndLoad),
    "Llumnix": _factory(Freeness),
}
OURS: Mapping[str, MakePolicy] = {"phalanx, no moves": partial(_ours, mode="Route"), "phalanx": _ours}
POLICIES = {**PEERS, **OURS}


def runs(settings: SimulationSettings, names: str) -> list[Run]:
    seed, share = settings.seed, settings.share
    rng = random.Random(seed)
    jitter, burst = rng.getrandbits(32), rng.getrandbits(32)
    compute = Setting(GROUPS, settings.machine.shape(TOKENS), seed=seed)
    scarce = Setting(GROUPS, settings.machine.shape(SCARCE_TOKENS), seed=seed)

    def azure_at(speed: float) -> Callable[[], list[Arrival]]:
        return lambda: scaled(speed_up(shifted(azure(settings.traces), seed, share, 19_366), speed))

    def mooncake_at() -> list[Arrival]:
        return scaled(speed_up(shifted(jittered(mooncake(settings.traces), random.Random(jitter)), seed, share, 12_031), 0.65))

    def bursts() -> list[Arrival]:
        return scaled(reasoning(REASONING_RATE, int(20_000 * share), random.Random(burst)), SCARCE_TOKENS)

    def oscillating() -> list[Arrival]:
        trace = repeat(scaled(shifted(azure(settings.traces), seed, 1.0, 19_366)))
        return waves(list(islice(trace, int(len(trace) * share))), *WAVE_RATES, WAVE_PERIOD_S)

    def scaled(arrivals: list[Arrival], tokens: int = TOKENS) -> list[Arrival]:
        return scale_load(arrivals, settings.machine, tokens)

    cells = {
        "A": [Run("A", name, make, compute, azure_at(4.5)) for name, make in POLICIES.items()],
        "B": [Run("B", name, make, compute, mooncake_at) for name, make in POLICIES.items()],
        "C": [Run("C", name, make, scarce, bursts) for name, make in POLICIES.items()],
        "D": [Run("D", name, make, replace(compute, slow=(0, 2.0, 60.0)), azure_at(3.5)) for name, make in POLICIES.items()],
        "E": [
            Run("E", f"{name}, reports {interval_s:g} s", make, replace(compute, report_every_s=interval_s), azure_at(4.5))
            for interval_s in REPORT_INTERVALS_S
            for name, make in (("phalanx", _ours), ("phalanx without its ledger", partial(_ours, has_ledger=False)))
        ],
        "S": [Run("S", name, _ours, setting, oscillating) for name, setting in _fleets(compute, settings.start_s).items()],
    }
    return [run for name in names for run in cells[name]]


def _fleets(compute: Setting, start_s: float) -> dict[str, Setting]:
    scaling = Scaling(MIN_GROUPS, GROUPS, start_s, TTFT_TARGET_S, ITL_TARGET_S)
    return {
        f"phalanx, {GROUPS} groups": compute,
        f"phalanx, {MEAN_GROUPS} groups": replace(compute, groups=MEAN_GROUPS),
        f"phalanx, {MIN_GROUPS} to {GROUPS} groups": replace(compute, groups=MIN_GROUPS, scaling=scaling),
    }
