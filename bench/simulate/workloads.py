"""The loads and fleets of balancing.md 4.3, and who runs on each.

A  conversations (Azure)                    B  long prompts that share beginnings (Mooncake)
C  long answers in bursts, few pages        D  A with a group of half the speed
E  A with reports of different age          S  A at a rate that goes up and down, with an operator that follows it
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.machines import ITL_TARGET_S, SCARCE_TOKENS, TOKENS, TTFT_TARGET_S, Machine, as_heavy
from bench.simulate.policies.chwbl import BoundedHash
from bench.simulate.policies.dynamo import OverlapAndLoad
from bench.simulate.policies.llmd import Scorers
from bench.simulate.policies.llumnix import Freeness
from bench.simulate.policies.lmetric import NewTokensTimesBatch
from bench.simulate.policies.others import LeastRequests, RoundRobin, TwoChoices
from bench.simulate.policies.ours import Ours
from bench.simulate.scaling import Scaling
from bench.simulate.scene import Policy
from bench.simulate.traffic import azure, jittered, mooncake, reasoning, shifted, sped_up, twice, waves
from bench.simulate.world import Setting
from phalanx_api.summary import BalancePolicy

LETTERS = "ABCDES"
GROUPS = 8
REASONING_RATE = 7.2
"""Requests a second at which their tokens just fit into the pages of eight groups."""
STALE_S = (0.05, 0.25, 1.0, 5.0)
WAVE, WAVE_S = (1.0, 4.5), 1200.0
"""Between so many times its own rate the Azure trace goes, and how long up and down take together."""
FEWEST, MEAN = 2, 6
"""Groups that the scaled fleet has at least, and those of a fixed one that costs about as much."""

MakePolicy = Callable[[Shape, int], Policy]
"""A policy for so many groups of this shape."""


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of the tables: who serves which load on which fleet."""

    workload: str
    policy: str
    make: MakePolicy
    setting: Setting
    arrivals: Callable[[], list[Arrival]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is played: where traces are, on which machine, which seed and part, how long a group takes to start."""

    traces: Path
    machine: Machine
    seed: int = 0
    share: float = 1.0
    start_s: float = 60.0


def _ours(shape: Shape, groups: int, mode: str = "Migrate", has_ledger: bool = True) -> Policy:
    policy = BalancePolicy(mode=mode, ttft_target_s=TTFT_TARGET_S, itl_target_s=ITL_TARGET_S)  # type: ignore[arg-type]
    return Ours(shape, groups, policy, has_ledger)


def _plain(kind: Callable[[], Policy]) -> MakePolicy:
    return lambda shape, groups: kind()


PEERS: Mapping[str, MakePolicy] = {
    "round robin": _plain(RoundRobin),
    "two choices": _plain(TwoChoices),
    "least requests": _plain(LeastRequests),
    "CHWBL": _plain(BoundedHash),
    "llm-d 2:1:1": _plain(Scorers),
    "LMetric": _plain(NewTokensTimesBatch),
    "Dynamo cost": _plain(OverlapAndLoad),
    "Llumnix": _plain(Freeness),
}
OURS: Mapping[str, MakePolicy] = {"phalanx, no moves": partial(_ours, mode="Route"), "phalanx": _ours}
EVERYONE = {**PEERS, **OURS}


def runs(choice: Choice, names: str) -> list[Run]:
    """The cells of these workloads (letters)."""
    seed, share = choice.seed, choice.share
    chance = random.Random(seed)
    jitter, burst = chance.getrandbits(32), chance.getrandbits(32)
    compute = Setting(GROUPS, choice.machine.shape(TOKENS), seed=seed)
    scarce = Setting(GROUPS, choice.machine.shape(SCARCE_TOKENS), seed=seed)

    def azure_at(speed: float) -> Callable[[], list[Arrival]]:
        return lambda: heavy(sped_up(shifted(azure(choice.traces), seed, share, 19_366), speed))

    def mooncake_at() -> list[Arrival]:
        return heavy(sped_up(shifted(jittered(mooncake(choice.traces), random.Random(jitter)), seed, share, 12_031), 0.65))

    def bursts() -> list[Arrival]:
        return heavy(reasoning(REASONING_RATE, int(20_000 * share), random.Random(burst)), SCARCE_TOKENS)

    def up_and_down() -> list[Arrival]:
        every = twice(heavy(shifted(azure(choice.traces), seed, 1.0, 19_366)))
        return waves(list(islice(every, int(len(every) * share))), *WAVE, WAVE_S)

    def heavy(arrivals: list[Arrival], tokens: int = TOKENS) -> list[Arrival]:
        return as_heavy(arrivals, choice.machine, tokens)

    cells = {
        "A": [Run("A", name, make, compute, azure_at(4.5)) for name, make in EVERYONE.items()],
        "B": [Run("B", name, make, compute, mooncake_at) for name, make in EVERYONE.items()],
        "C": [Run("C", name, make, scarce, bursts) for name, make in EVERYONE.items()],
        "D": [Run("D", name, make, replace(compute, slow=(0, 2.0, 60.0)), azure_at(3.5)) for name, make in EVERYONE.items()],
        "E": [
            Run("E", f"{name}, reports {old:g} s", make, replace(compute, report_every_s=old), azure_at(4.5))
            for old in STALE_S
            for name, make in (("phalanx", _ours), ("phalanx without its ledger", partial(_ours, has_ledger=False)))
        ],
        "S": [Run("S", name, _ours, setting, up_and_down) for name, setting in _fleets(compute, choice.start_s).items()],
    }
    return [run for name in names for run in cells[name]]


def _fleets(compute: Setting, start_s: float) -> dict[str, Setting]:
    """Fixed fleets, and one that follows the load."""
    scaling = Scaling(FEWEST, GROUPS, start_s, TTFT_TARGET_S, ITL_TARGET_S)
    return {
        f"phalanx, {GROUPS} groups": compute,
        f"phalanx, {MEAN} groups": replace(compute, groups=MEAN),
        f"phalanx, {FEWEST} to {GROUPS} groups": replace(compute, groups=FEWEST, scaling=scaling),
    }
