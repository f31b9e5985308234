"""Worlds that hypothesis chooses violate no invariant, and each invariant finds planted faults.

`make test-all` runs a minute of processor time of fixed seeds, `make search HOURS=n` other ones; its counterexamples are kept in
counterexamples.txt.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx_operator.kube.client import STATEFUL_SETS
from tests.control.search import history, machine, steps
from tests.control.search.ends import END_INVARIANTS
from tests.control.search.invariants import LOOK_INVARIANTS
from tests.control.search.mutants import MUTANTS, Mutant, hunt, num_places
from tests.slow_cases import some

KEPT = [line for line in Path(__file__).with_name("counterexamples.txt").read_text().splitlines() if line.startswith("start")]
WORLDS = 100
QUICK = ("metrics that vanish lower the count",)


@pytest.mark.parametrize("script", KEPT)
def test_former_counterexample_holds(script: str) -> None:
    assert steps.run(history.parse(script)).looks


@pytest.mark.parametrize("seed", some(range(101, 106), 101))
def test_chosen_worlds_hold(seed: int) -> None:
    """In processes of their own: hypothesis draws numbers from loaded modules too, so that others would give other worlds."""
    words = ["-m", "tests.control.search", "--seed", str(seed), "--worlds", str(WORLDS), "--no-shorten"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    found = re.search(rf"seed {seed}: (\d+) worlds, (\d+) looks", ran.stdout)
    assert ran.returncode == 0 and found, f"{' '.join(words)}\n{ran.stdout}{ran.stderr}"
    assert int(found[1]) >= WORLDS and int(found[2]) > 10 * WORLDS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_chosen_worlds_hold(seed: int) -> None:
    assert machine.run(seed, worlds=500).failure is None


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name in QUICK], ids=lambda mutant: mutant.name)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    found = hunt(mutant, tmp_path)
    assert [invariant for invariant in mutant.finds if f"{invariant}:" not in found] == [], found or "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.name not in QUICK], ids=lambda mutant: mutant.name)
def test_every_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    found = hunt(mutant, tmp_path)
    assert [invariant for invariant in mutant.finds if f"{invariant}:" not in found] == [], found or "nothing"


def test_every_invariant_has_a_planted_fault() -> None:
    names = {invariant.__name__ for invariant in (*LOOK_INVARIANTS, *END_INVARIANTS)}
    assert len(MUTANTS) >= 20
    assert [mutant.name for mutant in MUTANTS if num_places(mutant) != 1] == []
    assert names - {name for mutant in MUTANTS for name in mutant.finds} == set()


@pytest.mark.parametrize("between", ["", "restart; "])
def test_new_operator_remembers_missing_capacity(between: str) -> None:
    """The status has it: the rest of the rollout deletes first, though nodes are free again."""
    cordons, frees = ("; ".join(f"cordon {node} {value}" for node in range(6)) for value in (1, 0))
    script = history.parse(f"start 4 2 1 20 0; wait 4; wait 4; {cordons}; rollout 1; wait 6; wait 5; {between}{frees}; wait 4")
    world = steps.begin(script.start)
    for name, arguments in script.steps:
        steps.take(world, name, arguments)
    late = [look.before for look in world.looks if look.at > 600]
    assert max(sum(group.is_live and not group.is_draining for group in groups.values()) for groups in late) == 4


def test_late_list_shows_all_that_the_watch_did() -> None:
    """A list is consistent: a store never returns to what it was, and the watch continues from the list."""
    world = steps.begin(history.parse("start 2 0 1 20 0").start)
    operator = world.operators[0]
    world.look(operator)
    world.deliver(operator, STATEFUL_SETS, 1)
    world.relist(operator, STATEFUL_SETS, lag=9)
    assert len(operator.store(STATEFUL_SETS)) == 1
    world.relist(operator, STATEFUL_SETS)
    assert len(operator.store(STATEFUL_SETS)) == 2
