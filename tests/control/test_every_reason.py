"""Every reason that a condition may carry, and every rule of the CRD, is what some test is about: the lists are compared."""

import pathlib
import re
from typing import Any

import pytest

from phalanx_api.conditions import Reason, find_condition
from phalanx_api.crd import schema
from phalanx_api.summary import Cause, Hotspot
from phalanx_operator.decide import balanced
from phalanx_operator.decide.fleet import Fleet
from tests.cluster.rule_cases import REFUSED
from tests.control.builders import NOW, make_group, make_snapshot

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("kv", "KvBound"),
        ("prefill", "PrefillBound"),
        ("decode", "DecodeBound"),
        ("prefix", "PrefixSkew"),
        ("straggler", "Straggler"),
        ("full", "ImminentFull"),
    ],
)
def test_the_reason_of_each_cause_of_a_hotspot(cause: Cause, reason: str) -> None:
    fleet = Fleet(asked=1, answered=1, hotspots=(Hotspot("a", cause, 1.0, 0.1, 60.0, "steer"),))
    seen = make_snapshot(make_group("a"))
    condition = find_condition(balanced.told(seen.status, fleet, seen, NOW).conditions, "Balanced")
    assert condition and (condition.status, condition.reason) == ("False", reason)


def test_every_reason_is_expected_by_a_test() -> None:
    pages = "\n".join(page.read_text() for page in TESTS.rglob("test_*.py"))
    missing = [one for one in Reason if not re.search(rf'["/]{one.value}"|Reason\.{one.name}\b', pages)]
    assert missing == []


def rules(node: dict[str, Any]) -> list[str]:
    """The messages of all rules in a schema."""
    found = [one["message"] for one in node.get("x-kubernetes-validations", [])]
    for child in node.get("properties", {}).values():
        found += rules(child)
    for part in ("items", "additionalProperties"):
        if isinstance(node.get(part), dict):
            found += rules(node[part])
    return found


def test_every_rule_refuses_something_in_the_real_cluster() -> None:
    """The cases themselves are run by tests/cluster/test_rules.py, for only an API server evaluates rules."""
    told = [words.rpartition(".*")[2] for _, words in REFUSED]
    assert [message for message in rules(schema()) if not any(words in message for words in told)] == []
