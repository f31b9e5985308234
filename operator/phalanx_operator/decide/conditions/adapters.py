"""`AdaptersReady` and `status.adapters`, from router reports."""

from collections.abc import Mapping, Sequence

from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.spec.adapters import ServiceAdapter
from phalanx_api.status import (
    MAX_LOADED_GROUPS,
    MAX_REFUSING_GROUPS,
    AdapterRefusal,
    AdapterState,
    AdapterStatus,
    Status,
)
from phalanx_operator.decide.state.fleet import Fleet, GroupAdapters
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import Snapshot

_REASONS: dict[AdapterState, Reason] = {"Refused": Reason.ADAPTER_REFUSED, "Failing": Reason.ADAPTER_FAILING}


def with_adapters(status: Status, adapters: Sequence[ServiceAdapter], fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Sets the condition, which is absent without adapters. Both are unchanged while no router answers."""
    if not adapters:
        return status.model_copy(update={"adapters": (), "conditions": drop_condition(status.conditions, "AdaptersReady")})
    former = {adapter.name: adapter for adapter in snapshot.status.adapters}
    names = {group.name for group in live_groups(snapshot.groups)}
    groups = {name: group.adapters for name, group in fleet.groups.items() if name in names and group.adapters is not None}
    if not fleet.answered or not groups:
        listed = tuple(former.get(adapter.name, AdapterStatus(name=adapter.name, state="NotLoaded")) for adapter in adapters)
    else:
        listed = tuple(adapter_status(adapter.name, groups) for adapter in adapters)
    is_true, reason, message = _verdict(listed, has_groups=bool(groups))
    conditions = status.conditions
    if fleet.answered:
        conditions = set_condition(
            conditions, "AdaptersReady", is_true, reason=reason, message=message, generation=snapshot.generation, now=now
        )
    return status.model_copy(update={"adapters": listed, "conditions": conditions})


def adapter_status(name: str, groups: Mapping[str, GroupAdapters]) -> AdapterStatus:
    """Returns the state of an adapter: refused if groups have tried to load it, and none holds it. `groups`: by name."""
    loaded = sorted(group for group, adapters in groups.items() if name in adapters.loaded)
    refused = {group: adapters.refused[name] for group, adapters in groups.items() if name in adapters.refused}
    refusals = [
        AdapterRefusal(group=group, state="Refused" if refusal.is_final else "Failing", message=refusal.why[:256])
        for group, refusal in sorted(refused.items(), key=lambda item: (not item[1].is_final, item[1].why, item[0]))
    ]
    state: AdapterState = "Loaded" if loaded else "NotLoaded"
    if not loaded and refusals:
        state = "Refused" if all(refusal.state == "Refused" for refusal in refusals) else "Failing"
    return AdapterStatus(
        name=name,
        state=state,
        loaded=len(loaded),
        message=refusals[0].message if refusals else "",
        groups=tuple(loaded[:MAX_LOADED_GROUPS]),
        refusals=tuple(refusals[:MAX_REFUSING_GROUPS]),
    )


def _verdict(adapters: Sequence[AdapterStatus], *, has_groups: bool) -> tuple[bool | None, Reason, str]:
    if not has_groups:
        return None, Reason.NO_READY_GROUP, "no ready group loads adapters"
    for state, reason in _REASONS.items():
        if found := [f"{adapter.name}: {adapter.message}" for adapter in adapters if adapter.state == state]:
            return False, reason, "; ".join(found)
    return True, Reason.ADAPTERS_USABLE, ""
