"""Each rule of the CRD has a manifest in tests/cluster/rule_cases.py that breaks it."""

from collections.abc import Iterator
from typing import Any

from phalanx_api.crd import schema
from tests.cluster.rule_cases import REFUSED, STRANGE, Refused


def places(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path, such as `spec.a.b[].c`, and the schema of every field."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from places(child, f"{path}.{name}".removeprefix("."))
    for part, sign in {"items": "[]", "additionalProperties": "{}"}.items():
        if isinstance(node.get(part), dict):
            yield from places(node[part], path + sign)


def rules() -> list[tuple[str, str]]:
    """Returns (field, message) of all rules of the CRD."""
    found = [(path, rule) for path, node in PLACES for rule in node.get("x-kubernetes-validations", [])]
    return [((path + rule.get("fieldPath", "")).removeprefix("."), rule["message"]) for path, rule in found]


PLACES = list(places(schema()))


def place(case: Refused) -> str:
    return case.field.replace("[0]", "[]")


def broken(case: Refused) -> list[tuple[str, str]]:
    """Returns (field, message) of the rules that a case breaks."""
    return [(field, message) for field, message in rules() if field == place(case) and message.startswith(case.words)]


def test_every_rule_refuses_something_in_the_real_cluster() -> None:
    """tests/cluster/test_rules.py runs the cases: only a real API server evaluates rules."""
    assert len(set(rules())) == len(rules())
    assert set(rules()) - {rule for case in REFUSED for rule in broken(case)} == set()


def test_every_case_names_one_field_and_one_message() -> None:
    """A single word is ambiguous: it may be a part of the path, or of another message."""
    known = {path for path, _ in PLACES}
    assert [case.field for case in REFUSED if place(case) not in known or not case.field.startswith("spec.")] == []
    assert [case for case in REFUSED if " " not in case.words or len(broken(case)) > 1] == []
    assert known.isdisjoint(STRANGE)
