"""A record that is given what it has already."""

from phalanx_operator.decide.state.snapshot import ObservedGroup, changed


def test_unchanged_record_is_not_copied() -> None:
    group = ObservedGroup("g", "1", "r", "2026-01-01T00:00:00Z", 2)
    assert changed(group, lost="", tokens=0) is group
    assert changed(group, lost="", tokens=5) == ObservedGroup("g", "1", "r", "2026-01-01T00:00:00Z", 2, tokens=5)
    assert group.tokens == 0
