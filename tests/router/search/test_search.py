"""Fleets with faults drawn from a seed violate no invariant, and the invariants find planted faults.

`make test-all` runs a minute of processor time of fixed seeds, `make search HOURS=n` other ones; its counterexamples are kept in
counterexamples.txt.
"""

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.virtual.execution import run_processes
from bench.virtual.net import Fate, Process
from phalanx_api import wire
from tests.router.search import plan, search
from tests.router.search.__main__ import main
from tests.router.search.fleet import FleetWorld
from tests.router.search.invariants import INVARIANTS
from tests.router.search.mutants import MUTANTS, Mutant, hunt, num_places
from tests.slow_cases import some

KEPT = [line for line in Path(__file__).with_name("counterexamples.txt").read_text().splitlines() if line[:1].isdigit()]
SHORT = [line for line in KEPT if line.partition(" ")[0] in ("847", "28500133", "29000040")]
QUICK = "journals of ended streams are kept"


@pytest.mark.parametrize("line", some(KEPT, *SHORT))
def test_former_counterexample_holds(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    seed, _, faults = line.partition(" ")
    assert main(["--seed", seed, "--no-shorten", *(["--faults", faults] if faults else [])]) == 0
    shown = capsys.readouterr().out
    assert f"seed {seed}: " in shown
    if not faults:
        assert f" h, {len(plan.draw(int(seed)).faults)} faults, " in shown


def test_drawn_fleet_holds() -> None:
    drawn = plan.draw(159)
    outcome = search.run(drawn.first(3))
    assert (outcome.violations, outcome.parts) == ([], 3)
    assert outcome.streams and outcome.faults and outcome.virtual_s > 3600
    assert drawn.first(1) == plan.draw_burst(159)


def test_fleet_of_a_planning_operator_holds() -> None:
    """It scales and rolls out while clients stream."""
    faults = plan.parse("20 drain:leader 0 0 1; 60 lose:leader 0 0 1; 100 drain:leader 0 0 1")
    planned = plan.draw(30_000).replayed(faults)
    outcome = search.run(planned)
    assert planned.has_planner and outcome.violations == [] and outcome.streams and outcome.resumed


@pytest.mark.slow
def test_a_seed_gives_one_fleet_whatever_the_addresses() -> None:
    """Without a garbage collection, objects get other addresses: a set of streams would be in another order."""
    drawn = plan.draw(50_001).first(1)
    first = search.run(drawn)
    gc.disable()
    try:
        second = search.run(drawn)
    finally:
        gc.enable()
    assert first == second and first.moved and first.resumed


def test_fleet_holds_in_partitions_of_the_api_server() -> None:
    """Its nodes are silent, then the operator's calls fail, and a watch is late."""
    faults = "20 silence:nodes 0 4 100; 30 drain:leader 0 0 1; 60 cut:api-operator 0 0 90; 155 late watch:operator 1 0 60"
    outcome = search.run(plan.draw(40_002).replayed(plan.parse(faults)))
    assert outcome.violations == [] and outcome.streams


def test_faults_of_the_api_server_heal_within_their_part() -> None:
    former, drawn = plan.draw(plan.FIRST_PARTITIONED - 1), plan.draw(40_002)
    assert former.has_planner and drawn.has_planner
    added = [fault for fault in drawn.faults if fault.kind in ("silence", "late watch") or fault.where == "api-operator"]
    ends = [*(start - plan.CALMING_S for start in drawn.parts[1:]), drawn.life_s]
    assert added and all(fault.at + fault.seconds < next(end for end in ends if fault.at < end) + 1 for fault in added)
    assert not any(fault.kind in ("silence", "late watch") or fault.where == "api-operator" for fault in former.faults)


class _Frames:
    """Counts the frames between programs."""

    def __init__(self, world: FleetWorld) -> None:
        self.count = 0
        self.loads: list[bytes] = []
        """Load reports."""
        self._world = world

    def fate_of_message(self, sender: Process, receiver: Process, message: bytes) -> Fate:
        self.count += 1
        self.loads += [message] if b"load" in message[:8] else []
        return self._world.fate_of_message(sender, receiver, message)


def test_idle_programs_rarely_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers balance every 6 s; a link carries a frame a second to the router and one in 2.25 s to the leader.

    The frame to the router is the last load report, which the leader encodes once and the router decodes once.
    """
    decoded, decode = list[bytes](), wire.decode_from_leader

    def counted(message: bytes) -> object:
        decoded.append(message)
        return decode(message)

    monkeypatch.setattr(wire, "decode_from_leader", counted)

    async def run() -> None:
        quiet = replace(plan.draw_burst(847), asks=(), faults=())
        world = FleetWorld(quiet, Random(1))
        world.start()
        await asyncio.sleep(60)
        ticks: list[int] = []
        world.net.tap = frames = _Frames(world)
        for router in world.living_routers():
            router.backend.balancing.tick_listeners.append(lambda: ticks.append(1))
        decoded.clear()
        await asyncio.sleep(90)
        assert len(ticks) == 15 * quiet.num_routers
        polls = 6 * 2 * quiet.num_routers
        num_links = quiet.num_routers * quiet.num_groups
        assert frames.count <= 91 * num_links * (1 + 1 / 2.25) + polls
        assert len(frames.loads) >= 88 * num_links and len({id(message) for message in frames.loads}) == num_links
        assert decoded == []
        await world.close()

    run_processes(run())


@pytest.mark.parametrize("seed", some((60_003, 60_004, 60_005, 60_009), 60_003))
def test_whole_drawn_fleets_hold(seed: int) -> None:
    """The first and the last have a planning operator and partitions of the API server, the third has disks."""
    drawn = plan.draw(seed)
    outcome = search.run(drawn)
    assert (outcome.violations, outcome.parts, drawn.has_planner) == ([], len(drawn.parts), seed % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_more_drawn_fleets_hold(seed: int) -> None:
    assert search.run(plan.draw(seed)).violations == []


def test_stream_survives_its_router_and_both_groups() -> None:
    """The copy at the other router continues it. An equal seed gives an equal fleet."""
    faults = plan.parse("24 kill:router 0 0 1; 24.01 kill:leader 0 0 1; 24.02 kill:leader 0 0 1")
    outcome, again = (search.run(plan.draw(847).replayed(faults)) for _ in range(2))
    assert (outcome.violations, outcome.restarted) == ([], 0) and outcome.resumed > 1
    assert outcome == again


def test_faults_are_read_as_they_are_written() -> None:
    for seed in (0, 1, 40_002):
        drawn = plan.draw(seed).faults
        assert plan.parse("; ".join(map(str, drawn))) == drawn
    with pytest.raises(ValueError, match="no fault"):
        plan.parse("1.0 kill:moon 0 0 1")


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name == QUICK], ids=lambda mutant: mutant.name)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert f"{mutant.finds}:" in hunt(mutant, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name != QUICK], ids=lambda mutant: mutant.name)
def test_every_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert f"{mutant.finds}:" in hunt(mutant, tmp_path)


def test_each_invariant_has_planted_faults_in_their_places() -> None:
    assert {invariant.__name__ for invariant in INVARIANTS} <= {mutant.finds for mutant in MUTANTS}
    assert [mutant.name for mutant in MUTANTS if num_places(mutant) != 1] == []
