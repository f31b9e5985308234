"""`status.adapters` and the condition `AdaptersReady`."""

from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.spec.adapters import ServiceAdapter
from phalanx_api.status import AdapterRefusal, AdapterStatus, Status
from phalanx_api.wire import RefusedAdapter
from phalanx_operator.decide.conditions.adapters import with_adapters
from phalanx_operator.decide.state.fleet import Fleet
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.summaries import fleet_of, group, summary

WIDE = RefusedAdapter("legal", "r 64 exceeds --max-lora-rank 16")
SLOW = RefusedAdapter("legal", "the host does not answer", is_final=False)


def declared(*names: str) -> tuple[ServiceAdapter, ...]:
    fields = [{"name": name, "uri": f"file:///{name}"} for name in names]
    return make_service(engine={"maxAdapters": 2}, adapters=fields).spec.adapters


def decide(fleet: Fleet, former: Status | None = None, *names: str) -> Status:
    snapshot = make_snapshot(make_group("a"), make_group("b"), status=former or Status())
    return with_adapters(snapshot.status, declared(*names or ("legal",)), fleet, snapshot, NOW)


def holding(name: str, *adapters: str, refuses: RefusedAdapter | None = None) -> Any:
    return group(name, adapters=list(adapters), refused_adapters=[refuses] if refuses else [])


def legal(state: Any, *groups: str, refusals: tuple[AdapterRefusal, ...] = ()) -> AdapterStatus:
    message = refusals[0].message if refusals else ""
    return AdapterStatus(name="legal", state=state, loaded=len(groups), message=message, groups=tuple(groups), refusals=refusals)


def refusal(name: str, state: Any, refused: RefusedAdapter) -> AdapterRefusal:
    return AdapterRefusal(group=name, state=state, message=refused.why)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([holding("a"), holding("b")], legal("NotLoaded")),
        ([holding("a", "legal"), holding("b", "legal", "other")], legal("Loaded", "a", "b")),
        (
            [holding("a", "legal"), holding("b", refuses=SLOW)],
            legal("Loaded", "a", refusals=(refusal("b", "Failing", SLOW),)),
        ),
        ([holding("a", refuses=WIDE), holding("b")], legal("Refused", refusals=(refusal("a", "Refused", WIDE),))),
        (
            [holding("a", refuses=SLOW), holding("b", refuses=WIDE)],
            legal("Failing", refusals=(refusal("b", "Refused", WIDE), refusal("a", "Failing", SLOW))),
        ),
        ([holding("a", refuses=SLOW)], legal("Failing", refusals=(refusal("a", "Failing", SLOW),))),
        ([holding("gone", "legal"), holding("a")], legal("NotLoaded")),
    ],
)
def test_state_of_an_adapter_table(groups: list[Any], expected: AdapterStatus) -> None:
    assert decide(fleet_of(summary(*groups))).adapters == (expected,)


def test_lists_of_groups_are_bounded() -> None:
    names = [f"g{i:02d}" for i in range(40)]
    groups = [holding(name, "legal") for name in names[:30]] + [holding(name, refuses=WIDE) for name in names[30:]]
    snapshot = make_snapshot(*(make_group(name) for name in names))
    fleet = fleet_of(summary(*groups))
    (adapter,) = with_adapters(Status(), declared("legal"), fleet, snapshot, NOW).adapters
    assert (adapter.loaded, adapter.groups) == (30, tuple(names[:16]))
    assert [refused.group for refused in adapter.refusals] == names[30:38]


def test_condition_names_each_refused_adapter() -> None:
    fleet = fleet_of(summary(group("a", adapters=["fine"], refused_adapters=[WIDE, RefusedAdapter("code", "no such layer")])))
    condition = find_condition(decide(fleet, None, "legal", "code", "fine").conditions, "AdaptersReady")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "AdapterRefused")
    assert condition.message == "legal: r 64 exceeds --max-lora-rank 16; code: no such layer"


def test_condition_is_unknown_without_ready_groups() -> None:
    """What the last group has refused says nothing about the next one."""
    before = decide(fleet_of(summary(holding("a", refuses=WIDE))))
    condition = find_condition(decide(fleet_of(summary()), before).conditions, "AdaptersReady")
    assert condition is not None and (condition.status, condition.reason) == ("Unknown", "NoReadyGroup")


def test_silent_routers_leave_the_status_unchanged() -> None:
    before = decide(fleet_of(summary(holding("a", "legal"))))
    after = decide(Fleet(polled=1), before)
    assert (after.adapters, after.conditions) == (before.adapters, before.conditions)
    assert decide(Fleet(polled=1), before, "legal", "new").adapters == (
        legal("Loaded", "a"),
        AdapterStatus(name="new", state="NotLoaded"),
    )


def test_services_without_adapters_have_no_condition() -> None:
    before, snapshot = decide(fleet_of(summary(holding("a", "legal")))), make_snapshot(make_group("a"))
    after = with_adapters(before, (), fleet_of(summary(holding("a"))), snapshot, NOW)
    assert not after.adapters and find_condition(after.conditions, "AdaptersReady") is None
