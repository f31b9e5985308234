"""The loads and fleets of balancing.md 4.3, and who runs on each."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.policies.chwbl import BoundedHash
from bench.simulate.policies.dynamo import OverlapAndLoad
from bench.simulate.policies.llmd import Scorers
from bench.simulate.policies.llumnix import Freeness
from bench.simulate.policies.lmetric import NewTokensTimesBatch
from bench.simulate.policies.others import LeastRequests, RoundRobin, TwoChoices
from bench.simulate.policies.ours import Ours
from bench.simulate.scene import Policy
from bench.simulate.traffic import azure, jittered, mooncake, reasoning, sped_up
from bench.simulate.world import Setting
from phalanx_api.cost import StepModel
from phalanx_api.summary import BalancePolicy

GROUPS = 8
ANALYTIC = StepModel(fixed_s=0.003, token_s=0.00012, knee_tokens=142, context_s=0.068e-6, attention_s=0.0)
"""A 32B model on one H200: 3 ms, 17 ms of weights, 0.12 ms a prompt token, 0.068 us a token of context (balancing.md 4.3)."""
TOKENS, SCARCE_TOKENS = 200_000, 120_000
REASONING_RATE = 7.2
"""Requests a second at which their tokens just fit into the pages of eight groups."""
STALE_S = (0.05, 0.25, 1.0, 5.0)
TTFT_TARGET_S, ITL_TARGET_S = 2.0, 0.1

MakePolicy = Callable[[Shape], Policy]


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of the tables: who serves which load on which fleet."""

    workload: str
    policy: str
    make: MakePolicy
    setting: Setting
    arrivals: Callable[[], list[Arrival]]


def _ours(shape: Shape, mode: str = "Migrate", has_ledger: bool = True) -> Policy:
    policy = BalancePolicy(mode=mode, ttft_target_s=TTFT_TARGET_S, itl_target_s=ITL_TARGET_S)  # type: ignore[arg-type]
    return Ours(shape, GROUPS, policy, has_ledger)


def _plain(kind: Callable[[], Policy]) -> MakePolicy:
    return lambda shape: kind()


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


def shape_of(model: StepModel, tokens: int) -> Shape:
    """A group with pages for so many tokens."""
    return Shape(model, tokens // 16)


def read_model(path: Path | None) -> StepModel:
    """The cost function: the analytic one, or the coefficients that a calibration wrote, in the order of `StepModel`."""
    if path is None:
        return ANALYTIC
    told = json.loads(path.read_text())["step_model"]
    return StepModel(told[0], told[1], int(told[2]), *told[3:])


def runs(traces: Path, model: StepModel, seed: int, share: float, names: str) -> list[Run]:
    """The cells of these workloads (letters) for one seed; `share`: how much of each load is played."""
    chance = random.Random(seed)
    jitter, burst = chance.getrandbits(32), chance.getrandbits(32)
    compute = Setting(GROUPS, shape_of(model, TOKENS), seed=seed)
    scarce = Setting(GROUPS, shape_of(model, SCARCE_TOKENS), seed=seed)

    def azure_at(speed: float) -> Callable[[], list[Arrival]]:
        return lambda: sped_up(shifted(azure(traces), seed, share, 19_366), speed)

    def mooncake_at() -> list[Arrival]:
        return sped_up(shifted(jittered(mooncake(traces), random.Random(jitter)), seed, share, 12_031), 0.65)

    def bursts() -> list[Arrival]:
        return reasoning(REASONING_RATE, int(20_000 * share), random.Random(burst))

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
    }
    return [run for name in names for run in cells[name]]


def shifted(arrivals: object, seed: int, share: float, length: int) -> list[Arrival]:
    """A part of a trace that begins elsewhere for each seed, from time 0 on: round the end to its beginning."""
    every = list(arrivals)  # type: ignore[call-overload]
    wanted = max(1, int(min(length, len(every)) * share))
    first = random.Random(seed).randrange(len(every)) if seed else 0
    turned = every[first:] + [replace(one, at_s=one.at_s + every[-1].at_s + 0.1) for one in every[:first]]
    return [replace(one, at_s=one.at_s - turned[0].at_s) for one in turned[:wanted]]
