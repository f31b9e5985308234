"""The group with the least outstanding tokens is chosen, and the ledger fills the time between two reports."""

import pytest

from phalanx_api import wire
from phalanx_router.route.choose import Choice, NoChoice, choose
from phalanx_router.route.ledger import Ledger, request_cost
from phalanx_router.route.view import GroupView
from tests.router.fakes import make_request


def groups(**tokens: int) -> list[GroupView]:
    return [GroupView(key, outstanding_tokens=count) for key, count in tokens.items()]


@pytest.mark.parametrize(
    ("ready", "excluded", "draw", "key"),
    [
        (groups(a=5, b=3, c=9), set(), 0.0, "b"),
        (groups(a=5, b=3, c=9), {"b"}, 0.0, "a"),
        (groups(a=3, b=3, c=9), set(), 0.0, "a"),
        (groups(a=3, b=3, c=9), set(), 0.99, "b"),
        (groups(a=3, b=3, c=3), set(), 0.5, "b"),
        (groups(a=3), {"other"}, 0.5, "a"),
    ],
    ids=["least", "least left", "tie, low draw", "tie, high draw", "tie of three", "unknown exclusion"],
)
def test_choice(ready: list[GroupView], excluded: set[str], draw: float, key: str) -> None:
    choice = choose(ready, excluded, draw)
    assert isinstance(choice, Choice)
    assert choice.key == key
    assert choice.why.startswith("least outstanding tokens (")


@pytest.mark.parametrize(
    ("ready", "excluded", "why"),
    [([], set(), "no group is ready"), (groups(a=1, b=2), {"a", "b"}, "each of 2 ready groups failed or refused this request")],
    ids=["none", "all failed"],
)
def test_no_choice(ready: list[GroupView], excluded: set[str], why: str) -> None:
    assert choose(ready, excluded, 0.0) == NoChoice(why)


def test_a_dispatch_counts_until_the_second_report_after_it() -> None:
    ledger = Ledger()
    ledger.report(wire.Load(0, 0, 100, 0, 0))
    ledger.dispatch(7)
    assert ledger.outstanding_tokens == 107
    ledger.report(wire.Load(0, 0, 100, 0, 0))
    assert ledger.outstanding_tokens == 107
    ledger.dispatch(5)
    ledger.report(wire.Load(0, 0, 107, 0, 0))
    assert ledger.outstanding_tokens == 112
    ledger.report(wire.Load(0, 0, 112, 0, 0))
    assert ledger.outstanding_tokens == 112


def test_a_request_costs_its_prompt_and_all_its_output() -> None:
    assert request_cost(make_request([1, 2, 3], max_tokens=16)) == 19
