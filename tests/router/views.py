"""Group views from flat fields, and a step model."""

from dataclasses import fields
from typing import Any

from phalanx_api.cost import StepModel
from phalanx_router.routing.view import GroupCapacity, GroupLoad, GroupView

STEP_MODEL = StepModel(fixed_s=0.005, token_s=1e-4, knee_tokens=0, context_s=1e-7, attention_s=0.0)
CAPACITY = {field.name for field in fields(GroupCapacity)}
LOAD = {field.name for field in fields(GroupLoad)}


def make_group_view(key: str, **values: Any) -> GroupView:
    """A view with fields of `GroupView`, `GroupCapacity` and `GroupLoad`."""
    capacity = GroupCapacity(**{name: values.pop(name) for name in CAPACITY & values.keys()})
    load = GroupLoad(**{name: values.pop(name) for name in LOAD & values.keys()})
    return GroupView(key=key, capacity=capacity, load=load, **values)
