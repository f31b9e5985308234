"""Conditions that were set already in a look, set again by what weighs more."""

from phalanx_api.conditions import Condition, ConditionType, Reason, find_condition, set_condition
from phalanx_operator.decide.state.snapshot import Snapshot


def overruled(
    conditions: tuple[Condition, ...],
    kind: ConditionType,
    is_true: bool,
    reason: Reason,
    message: str,
    snapshot: Snapshot,
    now: str,
) -> tuple[Condition, ...]:
    """The conditions with this one set, since when it was so at the last look: what was set meanwhile of it nobody saw."""
    former = find_condition(snapshot.status.conditions, kind)
    if former:
        there = find_condition(conditions, kind)
        conditions = tuple(former if one is there else one for one in conditions) if there else (*conditions, former)
    return set_condition(conditions, kind, is_true, reason=reason, message=message, generation=snapshot.generation, now=now)
