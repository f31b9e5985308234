"""Copies of records."""

from phalanx_operator.decide.state.snapshot import GroupAssessment, ObservedGroup, replace_fields, with_assessment


def test_unchanged_record_is_not_copied() -> None:
    group = ObservedGroup(name="g", uid="1", revision="r", created="2026-01-01T00:00:00Z", size=2)
    assert replace_fields(group, size=2, gang="") is group
    assert with_assessment(group, lost_reason="", kv_tokens=0) is group
    assert with_assessment(group, lost_reason="", kv_tokens=5) == ObservedGroup(
        name="g",
        uid="1",
        revision="r",
        created="2026-01-01T00:00:00Z",
        size=2,
        assessment=GroupAssessment(kv_tokens=5),
    )
    assert group.assessment.kv_tokens == 0
