"""docs/searches.md has all invariants of the searches and the planted faults that they find, generated from these."""

import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.control.search import mutants as operator
from tests.control.search.ends import END_INVARIANTS, no_flip_flop
from tests.control.search.invariants import LOOK_INVARIANTS
from tests.router.search import mutants as fleet
from tests.router.search.invariants import INVARIANTS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "searches.md"
OF_CALLS = {
    "changed": "A client reads the tokens of the undisturbed run, or those that follow from the ones before.",
    "index": "A client reads each index once, in order.",
    "isolated": "A request under which two groups died goes to a group as one that runs alone, and is not moved.",
}
"""What a fleet checks at each token and frame."""
BETWEEN = re.compile(r"(<!-- (operator|fleets): generated .*? -->\n).*?(<!-- /\2 -->)", re.S)


def rows(invariants: Iterable[tuple[str, str]], found: Sequence[tuple[str, str]]) -> str:
    """Returns a table row per invariant. found: names of planted faults, each with an invariant that reports it."""
    lines = ["| invariant | what holds | planted faults that it finds |", "|---|---|---|"]
    for name, holds in invariants:
        lines.append(f"| `{name}` | {holds} | {'; '.join(fault for fault, by in found if by == name)} |")
    return "\n".join(lines) + "\n"


def described(invariants: Sequence[Callable[..., object]]) -> list[tuple[str, str]]:
    return [(one.__name__, " ".join((one.__doc__ or "").split("\n\n")[0].split())) for one in invariants]


def tables() -> dict[str, str]:
    of_operator = [(mutant.name, name) for mutant in operator.MUTANTS for name in mutant.finds]
    of_fleets = [(mutant.name, mutant.finds) for mutant in fleet.MUTANTS]
    looks = described((*LOOK_INVARIANTS, *END_INVARIANTS, no_flip_flop))
    both = [pair for pair in looks if pair[0] in {mutant.finds for mutant in fleet.MUTANTS}]
    own = described(INVARIANTS)
    return {"operator": rows(looks, of_operator), "fleets": rows([*own, *OF_CALLS.items(), *both], of_fleets)}


def test_list_of_planted_faults_is_current(request: pytest.FixtureRequest) -> None:
    text, made = PAGE.read_text(), tables()
    text = BETWEEN.sub(lambda found: found[1] + made[found[2]] + found[3], text)
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run `make golden`"
    assert all(table in text for table in made.values())
    names = [mutant.name for mutant in (*operator.MUTANTS, *fleet.MUTANTS)]
    assert [name for name in names if name not in text] == []
    assert f"{len(operator.MUTANTS)} planted faults of the operator and {len(fleet.MUTANTS)} of" in text
