"""Which group loads a declared adapter that a request waits for."""

import pytest

from phalanx_api import wire
from phalanx_router.dispatch.adapter_loads import AdapterGroup, LoadPlan, plan_load

REFUSED = wire.RefusedAdapter("legal", "r 64 exceeds --max-lora-rank 16")
LATER = wire.RefusedAdapter("legal", "the host does not answer", is_final=False)


def group(
    key: str,
    refused: wire.RefusedAdapter | None = None,
    *,
    free: int = 1,
    requests: int = 0,
    loads: int = 0,
    idle: float | None = None,
    **flags: bool,
) -> AdapterGroup:
    flags = {"holds": False, "is_loading": False, "is_open": True} | flags
    return AdapterGroup(key=key, num_free=free, num_requests=requests, num_loads=loads, idle_since=idle, refused=refused, **flags)


FULL = group("a", holds=True, is_open=False)


@pytest.mark.parametrize(
    ("groups", "plan"),
    [
        ([], LoadPlan(is_held=False)),
        ([group("a")], LoadPlan(is_held=False, load="a")),
        ([group("a", requests=2), group("b", requests=1)], LoadPlan(is_held=False, load="b")),
        ([group("a", free=0), group("b", requests=9)], LoadPlan(is_held=False, load="b")),
        ([group("a", is_loading=True), group("b")], LoadPlan(is_held=False)),
        ([group("a", free=0), group("b", free=0, requests=9, idle=5.0)], LoadPlan(is_held=False, load="b")),
        ([group("a", free=0, idle=6.0), group("b", free=0, requests=9, idle=5.0)], LoadPlan(is_held=False, load="b")),
        ([group("a", free=0, requests=2), group("b", free=0, requests=1)], LoadPlan(is_held=False, load="b")),
        ([group("a", free=0, loads=1), group("b", free=0, requests=1)], LoadPlan(is_held=False, load="b")),
        ([FULL, group("b", free=-1, idle=1.0)], LoadPlan(is_held=True)),
        ([group("a", requests=2, idle=1.0), group("b", requests=1)], LoadPlan(is_held=False, load="b")),
        ([group("a", free=0, idle=1.0), group("b", requests=9)], LoadPlan(is_held=False, load="b")),
        ([group("a", holds=True), group("b")], LoadPlan(is_held=True)),
        ([group("a", holds=True, is_open=False), group("b")], LoadPlan(is_held=True, load="b")),
        ([group("a", holds=True, is_open=False), group("b", free=0)], LoadPlan(is_held=True)),
        ([group("a", holds=True, is_open=False), group("b", is_open=False)], LoadPlan(is_held=True)),
        ([group("a", has_other=True)], LoadPlan(is_held=False)),
        ([group("a", holds=True, is_open=False), group("b", free=0, has_other=True)], LoadPlan(is_held=True, load="b")),
        ([group("a", holds=True, is_open=False), group("b", has_other=True), group("c")], LoadPlan(is_held=True, load="c")),
        ([FULL, group("b", has_other=True, was_asked=True)], LoadPlan(is_held=True)),
        ([FULL, group("b", has_other=True, was_asked=True), group("c", has_other=True)], LoadPlan(is_held=True, load="c")),
        ([FULL, group("b", has_other=True, is_loading=True), group("c", has_other=True)], LoadPlan(is_held=True)),
        ([FULL, group("b", has_other=True, is_loading=True), group("c")], LoadPlan(is_held=True, load="c")),
        ([group("a", has_other=True, is_loading=True), group("b")], LoadPlan(is_held=False, load="b")),
        ([group("a", REFUSED), group("b")], LoadPlan(is_held=False, load="b")),
        ([group("a", REFUSED), group("b", REFUSED)], LoadPlan(is_held=False, load="a", refused=REFUSED)),
        ([group("a", REFUSED), group("b", LATER)], LoadPlan(is_held=False, load="b", refused=LATER)),
        ([group("a", REFUSED), group("b", holds=True)], LoadPlan(is_held=True)),
    ],
)
def test_load_goes_to_the_best_group(groups: list[AdapterGroup], plan: LoadPlan) -> None:
    assert plan_load(groups) == plan
