"""`DevicesHealthy`, from router reports: Xid and ECC errors, lost devices, reduced clocks."""

from phalanx_api.conditions import Reason, find_condition, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import Snapshot


def with_devices_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """Sets the condition, which is absent until a problem is reported; unchanged while a router does not answer."""
    names = {group.name for group in live_groups(snapshot.groups)}
    reported = [
        (group.name, problem)
        for group in sorted(fleet.groups.values(), key=lambda group: group.name)
        for problem in group.engine.devices
        if group.name in names
    ]
    is_known = find_condition(status.conditions, "DevicesHealthy") is not None
    if not reported and (not is_known or not fleet.is_complete or not fleet.answered):
        return status
    faults = [(name, problem) for name, problem in reported if problem.kind == "fault"]
    reason = Reason.DEVICE_FAULT if faults else Reason.DEVICE_THROTTLED if reported else Reason.HEALTHY
    conditions = set_condition(
        status.conditions,
        "DevicesHealthy",
        not reported,
        reason=reason,
        message="; ".join(f"{name}: {problem}" for name, problem in faults or reported),
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})


def throttled_devices(fleet: Fleet, group: str) -> str:
    """Returns the throttled devices of a group, as a cause of its slow steps; empty if there are none."""
    report = fleet.groups.get(group)
    problems = report.engine.devices if report is not None else ()
    return ", ".join(str(problem) for problem in problems if problem.kind == "throttled")
