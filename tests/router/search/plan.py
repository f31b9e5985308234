"""What happens in one fleet: its size, requests and faults, all drawn from a seed.

A fleet lives through bursts of 120 to 900 s, with requests and faults seconds apart, and through quiet hours between them, with a
request every ten minutes and a fault every 45. The seed's first burst is its first part; after each part the fleet must calm.
"""

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from phalanx_api.summary import Mode
from tests.runtime.fake_runner import VOCAB

Pair = Literal["client-router", "router-leader", "router-router", "operator-router", "api-router", "leader-leader"]
Kind = Literal[
    "cut",
    "one way",
    "slow",
    "drop",
    "freeze",
    "clock",
    "kill",
    "lose",
    "drain",
    "move",
    "corrupt pages",
    "restart operator",
    "slow disk",
    "lost pages",
    "silence",
    "late watch",
]
PAIRS: tuple[Pair, ...] = get_args(Pair)
WEIGHTS: dict[tuple[Kind, str], int] = {
    **{("cut", pair): 2 for pair in PAIRS},
    **{("one way", pair): 2 for pair in PAIRS},
    **{("slow", pair): 1 for pair in PAIRS},
    ("drop", "client-router"): 4,
    ("drop", "router-leader"): 4,
    ("drop", "router-router"): 2,
    ("freeze", "router"): 4,
    ("freeze", "leader"): 4,
    ("freeze", "client"): 1,
    ("freeze", "operator"): 1,
    ("clock", "router"): 1,
    ("clock", "leader"): 1,
    ("kill", "router"): 4,
    ("kill", "leader"): 4,
    ("lose", "router"): 2,
    ("lose", "leader"): 2,
    ("drain", "router"): 3,
    ("drain", "leader"): 3,
    ("move", "leader"): 8,
    ("corrupt pages", "leader-leader"): 1,
    ("restart operator", "operator"): 1,
    ("slow disk", "leader"): 2,
    ("lost pages", "leader"): 1,
}
API_WEIGHTS: dict[tuple[Kind, str], int] = {
    ("silence", "node"): 4,
    ("silence", "nodes"): 2,
    ("cut", "api-operator"): 2,
    ("one way", "api-operator"): 2,
    ("cut", "api-router"): 2,
    ("late watch", "operator"): 4,
}
"""Faults between the API server and the nodes, operator and routers of a planning operator's fleet. They are drawn apart."""
PAGE_SIZE, ENDLESS_TOKENS = 4, 3000
NUM_BURSTS, BURST_S = 3, (120.0, 300.0, 900.0)
ASK_S, FAULT_S = (3.0, 10.0), (5.0, 15.0, 45.0)
"""Mean time between requests and faults of a burst."""
QUIET_H = (1.0, 2.0, 4.0)
"""Hours between two bursts."""
QUIET_ASK_S, QUIET_FAULT_S = 600.0, 2700.0
"""Mean time between requests and faults of quiet hours."""
FIRST_PLANNED = 10_000
"""From this seed on, the operator plans for one of three fleets."""
FIRST_SALTED = 100_000_000
"""From this seed on, the groups of odd seeds round differently: each start of a group samples other tokens."""
FIRST_PARTITIONED = 40_000
"""From this seed on, such fleets have partitions of the API server and late watches too."""
API_GAP_S, API_GAPS, API_S = 120.0, 8.0, (20.0, 700.0)
"""Least mean time between these faults, most of them in a part on average, and how long each lasts."""
CALMING_S = 450.0
"""Between the last event of a part and the first of the next: longer than a fleet may take to calm."""
MODES: tuple[Mode, ...] = ("Migrate", "Migrate", "Requeue", "Route", "Off")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `kind` of the processes in `where`. `one`, `other`: which of those that there are; `seconds`: until it heals."""

    number: int
    at: float
    kind: Kind
    where: str
    one: int
    other: int
    seconds: float

    def __str__(self) -> str:
        """Without rounding: another order of two events may make another fleet."""
        return f"{self.at!r} {self.kind}:{self.where} {self.one} {self.other} {self.seconds!r}"


def parse(text: str) -> tuple[Fault, ...]:
    """Parses faults, separated by `;`. Raises ValueError."""
    faults: list[Fault] = []
    for line in filter(None, (part.strip() for part in text.split(";"))):
        at, _, rest = line.partition(" ")
        what, one, other, seconds = rest.rsplit(" ", 3)
        kind, _, where = what.partition(":")
        found: list[Kind] = [known for known, place in (*WEIGHTS, *API_WEIGHTS) if (known, place) == (kind, where)]
        if not found:
            raise ValueError(f"no fault {kind}:{where}")
        faults.append(Fault(len(faults), float(at), found[0], where, int(one), int(other), float(seconds)))
    return tuple(faults)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    number: int
    at: float
    machine: int
    prompt: list[int]
    max_tokens: int
    seed: int
    stop: list[int]
    can_resume: bool
    leaves_after: int | None
    """Tokens after which the client leaves."""
    reconnects_after: int | None
    """Tokens after which it reconnects, at another router or the same, although its connection is whole."""
    leaves_on_loss: bool
    """Leaves when its connection ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One fleet."""

    seed: int
    life_s: float
    num_routers: int
    num_groups: int
    num_ranks: int
    num_pages: int
    step_s: float
    flights: int
    mode: Mode
    noise: float
    """Share of frames of moves that are duplicated or lost."""
    coalesces: bool
    has_disk: bool
    """Groups keep evicted pages in host memory and on disk."""
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    parts: tuple[float, ...] = (0.0,)
    """When each part begins, a burst or quiet hours."""
    has_planner: bool = False
    """The operator starts, drains and deletes the groups."""

    @property
    def is_salted(self) -> bool:
        """Whether groups sample different tokens."""
        return self.seed >= FIRST_SALTED and self.seed % 2 == 1

    def events(self) -> Iterator[tuple[float, tuple[Fault, ...]]]:
        """Yields of each part the time of its last request, 0 without any, and its faults."""
        for start, end in pairwise((*self.parts, math.inf)):
            asked = [ask.at for ask in self.asks if start <= ask.at < end]
            yield max(asked, default=0.0), tuple(fault for fault in self.faults if start <= fault.at < end)

    def first(self, count: int) -> "Plan":
        """Returns the first parts, at least one."""
        end = (*self.parts, math.inf)[max(1, count)] - CALMING_S
        asks = tuple(ask for ask in self.asks if ask.at < end)
        faults = tuple(fault for fault in self.faults if fault.at < end)
        return replace(self, life_s=min(self.life_s, end), asks=asks, faults=faults, parts=self.parts[: max(1, count)])

    def replayed(self, faults: tuple[Fault, ...], parts: int = 0) -> "Plan":
        """Returns the first parts with these faults in place of its own. parts: 0 for those until the last fault."""
        last = max([fault.at for fault in faults], default=0.0)
        return replace(self.first(parts or sum(start <= last for start in self.parts)), faults=faults)

    def only(self, faults: Collection[int]) -> "Plan":
        """Returns the plan with these faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault.number in faults))


def draw(seed: int) -> Plan:
    """Draws a plan."""
    plan = _with_more_parts(random.Random(f"parts {seed}"), draw_burst(seed))
    plan = replace(plan, has_planner=seed >= FIRST_PLANNED and seed % 3 == 0)
    has_partitions = plan.has_planner and seed >= FIRST_PARTITIONED
    return _with_api_faults(random.Random(f"api {seed}"), plan) if has_partitions else plan


def draw_burst(seed: int) -> Plan:
    """Draws the first part of a plan."""
    rng = random.Random(f"fleet {seed}")
    disk_rng = random.Random(f"stored {seed}")  # leaves the other draws of a seed unchanged
    has_disk = disk_rng.random() < 0.4
    num_pages = rng.choice((60, 400))
    num_pages = 60 if has_disk else num_pages  # pages are evicted
    life_s = rng.choice(BURST_S)
    step_s = rng.choice((0.05, 0.1, 0.25))
    interval_s = rng.choice(FAULT_S)
    plan = Plan(
        seed=seed,
        life_s=life_s,
        num_routers=rng.choice((1, 2, 2, 3)),
        num_groups=rng.choice((1, 2, 3, 4)),
        num_ranks=rng.choice((1, 2)),
        num_pages=num_pages,
        step_s=step_s,
        flights=rng.choice((1, 1, 2)),
        mode=rng.choice(MODES),
        noise=rng.choice((0.0, 0.03)),
        coalesces=rng.random() < 0.3,
        has_disk=has_disk,
        asks=tuple(_asks(rng, life_s, step_s, num_pages * PAGE_SIZE)),
        faults=tuple(_faults(rng, life_s, interval_s)),
    )
    return replace(plan, asks=tuple(_with_shared_prompts(disk_rng, plan.asks))) if has_disk else plan


def _with_more_parts(rng: random.Random, plan: Plan) -> Plan:
    """Adds quiet hours and another burst, twice."""
    asks, faults, parts = list(plan.asks), list(plan.faults), [0.0]
    end = plan.life_s
    for _ in range(NUM_BURSTS - 1):
        for life_s, is_quiet in ((3600.0 * rng.choice(QUIET_H), True), (rng.choice(BURST_S), False)):
            start = end + CALMING_S
            end = start + life_s
            gap_s, interval_s = (QUIET_ASK_S, QUIET_FAULT_S) if is_quiet else (rng.choice(ASK_S), rng.choice(FAULT_S))
            new = _asks(rng, life_s, plan.step_s, plan.num_pages * PAGE_SIZE, gap_s)
            new = _with_shared_prompts(rng, new) if plan.has_disk else new
            asks += [replace(ask, number=len(asks) + i, at=start + ask.at) for i, ask in enumerate(new)]
            for fault in _faults(rng, life_s, interval_s):
                faults.append(replace(fault, number=len(faults), at=start + fault.at))
            parts.append(start)
    return replace(plan, life_s=end, asks=tuple(asks), faults=tuple(faults), parts=tuple(parts))


def _with_api_faults(rng: random.Random, plan: Plan) -> Plan:
    """Adds faults of the API server, each of which heals before its part ends."""
    faults = list(plan.faults)
    for start, end in pairwise((*plan.parts, plan.life_s + CALMING_S)):
        at, end = start + 5.0, end - CALMING_S
        while (at := at + rng.expovariate(1 / max(API_GAP_S, (end - start) / API_GAPS))) < end:
            kind, where = rng.choices(list(API_WEIGHTS), weights=list(API_WEIGHTS.values()))[0]
            seconds = min(math.exp(rng.uniform(*map(math.log, API_S))), end - at)
            faults.append(Fault(0, at, kind, where, rng.randrange(12), rng.randrange(12), seconds))
    faults.sort(key=lambda fault: fault.at)
    return replace(plan, faults=tuple(replace(fault, number=number) for number, fault in enumerate(faults)))


def _with_shared_prompts(rng: random.Random, asks: Sequence[Ask]) -> list[Ask]:
    """Returns the requests with prompts that begin as a former one, so that pages are read again."""
    shared: list[Ask] = []
    for ask in asks:
        if shared and ask.leaves_after is None and rng.random() < 0.8:
            former = rng.choice(shared[-20:]).prompt
            ask = replace(ask, prompt=[*former[: rng.randint(len(former) // 2, len(former))], *ask.prompt[:12]][:60])
        shared.append(ask)
    return shared


def _asks(rng: random.Random, life_s: float, step_s: float, num_slots: int, gap_s: float | None = None) -> list[Ask]:
    asks: list[Ask] = []
    at, gap_s, longest = 1.0, gap_s or rng.choice(ASK_S), int(rng.choice((4.0, 20.0)) / step_s)
    while at < life_s:
        if asks and rng.random() < 0.15:  # an equal request, as a burst of agents sends it
            ask = replace(asks[-1], number=len(asks), at=at)
        else:
            ask = _ask(rng, len(asks), at, min(longest, 120), num_slots)
        asks.append(replace(ask, machine=rng.randrange(3)))
        at += rng.expovariate(1 / gap_s)
    return asks


def _ask(rng: random.Random, number: int, at: float, longest: int, num_slots: int) -> Ask:
    max_tokens = rng.randint(1, longest)
    leaves_after = rng.randint(0, max_tokens) if rng.random() < 0.08 else None
    leaves_on_loss = rng.random() < 0.05
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
    return Ask(
        number=number,
        at=at,
        machine=0,
        prompt=prompt,
        # A leader may continue a request after its client has left: long ones would hold pages until the end.
        max_tokens=max_tokens if leaves_after is None else min(num_slots - len(prompt) - 2 * PAGE_SIZE, ENDLESS_TOKENS),
        seed=rng.randrange(1000),
        stop=[rng.randrange(VOCAB)] if leaves_after is None and rng.random() < 0.2 else [],
        can_resume=rng.random() < 0.85,
        leaves_after=leaves_after,
        reconnects_after=rng.randint(1, max_tokens) if rng.random() < 0.1 else None,
        leaves_on_loss=leaves_on_loss,
    )


def _faults(rng: random.Random, life_s: float, interval_s: float) -> list[Fault]:
    faults: list[Fault] = []
    at = 5.0
    while (at := at + rng.expovariate(1 / interval_s)) < life_s:
        kind, where = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        seconds = 10 ** rng.uniform(-1.3, 1.6)
        faults.append(Fault(len(faults), at, kind, where, rng.randrange(12), rng.randrange(12), seconds))
    return faults
