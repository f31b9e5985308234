from phalanx_api.conditions import Condition, Reason, drop_condition, find_condition, set_condition


def ready(status: bool, now: str, reason: Reason = Reason.READY) -> tuple[Condition, ...]:
    return set_condition((), "Ready", status, reason=reason, generation=1, now=now)


def test_a_new_condition_is_added_after_the_others() -> None:
    both = set_condition(ready(True, "t1"), "Available", False, reason=Reason.NO_READY_GROUP, generation=2, now="t2")
    assert [(c.type, c.status, c.observed_generation) for c in both] == [("Ready", "True", 1), ("Available", "False", 2)]


def test_the_transition_time_moves_only_with_the_status() -> None:
    same = set_condition(ready(True, "t1"), "Ready", True, reason=Reason.SUSPENDED, generation=2, now="t2")
    other = set_condition(same, "Ready", False, reason=Reason.ROLLING_OUT, generation=3, now="t3")
    assert [same[0].last_transition_time, same[0].reason] == ["t1", "Suspended"]
    assert [other[0].last_transition_time, other[0].status] == ["t3", "False"]


def test_setting_twice_changes_nothing() -> None:
    once = ready(True, "t1")
    again = set_condition(once, "Ready", True, reason=Reason.READY, generation=1, now="t9")
    assert again == once and again[0] is once[0]


def test_message_is_truncated_the_same_way_each_time() -> None:
    once = set_condition((), "Ready", False, reason=Reason.REJECTED, message="x" * 5000, generation=1, now="t")
    assert set_condition(once, "Ready", False, reason=Reason.REJECTED, message="x" * 5000, generation=1, now="t2")[0] is once[0]


def test_conditions_are_found_and_dropped_by_type() -> None:
    conditions = ready(True, "t1")
    assert find_condition(conditions, "Ready") == conditions[0]
    assert find_condition(conditions, "Stalled") is None
    assert drop_condition(conditions, "Ready") == ()


def test_long_messages_are_truncated_to_the_schema_bound() -> None:
    set_ = set_condition((), "Ready", False, reason=Reason.REJECTED, message="x" * 5000, generation=1, now="t")
    assert len(set_[0].message) == 1024
