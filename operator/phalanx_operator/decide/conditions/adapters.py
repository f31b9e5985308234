"""`AdaptersReady` and `status.adapters`, from router reports."""

from collections.abc import Sequence

from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.spec.adapters import ServiceAdapter
from phalanx_api.status import AdapterState, AdapterStatus, Status
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
    groups = [group.adapters for group in fleet.groups.values() if group.name in names and group.adapters is not None]
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


def adapter_status(name: str, groups: Sequence[GroupAdapters]) -> AdapterStatus:
    """Returns the state of an adapter: refused if groups have tried to load it, and none holds it."""
    loaded = sum(name in group.loaded for group in groups)
    refusals = [group.refused[name] for group in groups if name in group.refused]
    refusal = min(refusals, key=lambda refused: (not refused.is_final, refused.why), default=None)
    state: AdapterState = "Loaded" if loaded else "NotLoaded"
    if not loaded and refusals:
        state = "Refused" if all(refused.is_final for refused in refusals) else "Failing"
    return AdapterStatus(name=name, state=state, loaded=loaded, message="" if refusal is None else refusal.why[:256])


def _verdict(adapters: Sequence[AdapterStatus], *, has_groups: bool) -> tuple[bool | None, Reason, str]:
    if not has_groups:
        return None, Reason.NO_READY_GROUP, "no ready group loads adapters"
    for state, reason in _REASONS.items():
        if found := [f"{adapter.name}: {adapter.message}" for adapter in adapters if adapter.state == state]:
            return False, reason, "; ".join(found)
    return True, Reason.ADAPTERS_USABLE, ""
