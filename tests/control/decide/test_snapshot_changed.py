"""A record that is given what it has already."""

from phalanx_operator.decide.state.snapshot import ObservedGroup, changed


def test_unchanged_record_is_not_copied() -> None:
    group = ObservedGroup(name="g", uid="1", revision="r", created="2026-01-01T00:00:00Z", size=2)
    assert changed(group, lost="", tokens=0) is group
    assert changed(group, lost="", tokens=5) == ObservedGroup(
        name="g", uid="1", revision="r", created="2026-01-01T00:00:00Z", size=2, tokens=5
    )
    assert group.tokens == 0
