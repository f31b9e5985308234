"""Conditions of an InferenceService. True is good, except in those that are absent unless true.

These are `Stalled` and `Reconciling` (kstatus), `ControlPlanePartitioned`, and `DisruptionsHeld`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field

from phalanx_api.schema import Record

ConditionType = Literal[
    "Ready",
    "Available",
    "Progressing",
    "Reconciling",
    "Stalled",
    "RouterReady",
    "CertificateValid",
    "CapacityAvailable",
    "ModelCached",
    "ScalingActive",
    "Balanced",
    "Compatible",
    "Speculating",
    "DevicesHealthy",
    "CacheSized",
    "AdaptersReady",
    "ControlPlanePartitioned",
    "DisruptionsHeld",
]
ALARMS: tuple[ConditionType, ...] = ("Stalled", "ControlPlanePartitioned", "DisruptionsHeld")
"""Conditions that are bad when true."""
ConditionStatus = Literal["True", "False", "Unknown"]


class Reason(StrEnum):
    """Reasons of conditions."""

    READY = "Ready"
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    SPEC_INVALID = "SpecInvalid"
    REJECTED = "Rejected"
    """The Kubernetes API server refused a child object; the message quotes it."""
    RETRYING = "Retrying"
    """Calls to the Kubernetes API server keep failing; the message quotes it."""
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_FAILING = "PodFailing"
    ROLLING_OUT = "RollingOut"
    GROUPS_NOT_READY = "GroupsNotReady"
    UNREACHABLE = "Unreachable"
    """A group's node is silent to the control plane, but routers receive the group's load, or many nodes are silent."""
    ROUTER_NOT_READY = "RouterNotReady"
    SERVING = "Serving"
    NO_READY_GROUP = "NoReadyGroup"
    HOLDING = "Holding"
    """No group runs, by policy; requests are held until one does."""
    ROLLING = "Rolling"
    SCALING = "Scaling"
    COMPLETE = "Complete"
    PAUSED = "Paused"
    SURGE_UNSCHEDULABLE = "SurgeUnschedulable"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"
    RESTART_BUDGET_SPENT = "RestartBudgetSpent"
    VALID = "Valid"
    INVALID_CERTIFICATE = "InvalidCertificate"
    EXPIRED = "Expired"
    SCHEDULED = "Scheduled"
    UNSCHEDULABLE = "Unschedulable"
    GANG_WAITING = "GangWaiting"
    CACHED = "Cached"
    DOWNLOADING = "Downloading"
    AUTH_FAILED = "AuthFailed"
    NOT_FOUND = "NotFound"
    CLAIM_UNBOUND = "ClaimUnbound"
    ACTIVE = "Active"
    EXTERNAL = "External"
    """HPA or KEDA writes `spec.replicas`."""
    ADVISORY = "Advisory"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    CONFLICTING_SCALER = "ConflictingScaler"
    DISABLED = "Disabled"
    BALANCED = "Balanced"
    FLEET_SATURATED = "FleetSaturated"
    ROUTERS_SILENT = "RoutersSilent"
    KV_BOUND = "KvBound"
    PREFILL_BOUND = "PrefillBound"
    DECODE_BOUND = "DecodeBound"
    PREFIX_SKEW = "PrefixSkew"
    STRAGGLER = "Straggler"
    IMMINENT_FULL = "ImminentFull"
    UNKNOWN_VERSION = "UnknownVersion"
    VERSIONS_AGREE = "VersionsAgree"
    PROPOSING = "Proposing"
    DRAFT_LOST = "DraftLost"
    HEALTHY = "Healthy"
    DEVICE_FAULT = "DeviceFault"
    """An Xid or ECC error, or a lost device."""
    DEVICE_THROTTLED = "DeviceThrottled"
    NODES_SILENT = "NodesSilent"
    """Many nodes became not ready together: the control plane is partitioned. `Available` is true by the routers' reports."""
    STRAGGLERS_TOGETHER = "StragglersTogether"
    RESTARTS_TOGETHER = "RestartsTogether"
    """Many groups exceed their restart budgets together: one at a time is given up."""
    CLOCK_CHANGED = "ClockChanged"
    WORKING_SET_FITS = "WorkingSetFits"
    TOO_FEW_PAGES = "TooFewPages"
    TOO_FEW_HOST_PAGES = "TooFewHostPages"
    TOO_FEW_LOOKUPS = "TooFewLookups"
    ADAPTERS_USABLE = "AdaptersUsable"
    ADAPTER_REFUSED = "AdapterRefused"
    ADAPTER_FAILING = "AdapterFailing"
    """The download or the load of an adapter failed, and is tried again."""


Cause = Literal["kv", "prefill", "decode", "prefix", "straggler", "full"]
"""Cause of a hotspot; `full`: the page pool is nearly exhausted."""
REASON_OF_CAUSE: Mapping[Cause, Reason] = {
    "kv": Reason.KV_BOUND,
    "prefill": Reason.PREFILL_BOUND,
    "decode": Reason.DECODE_BOUND,
    "prefix": Reason.PREFIX_SKEW,
    "straggler": Reason.STRAGGLER,
    "full": Reason.IMMINENT_FULL,
}
"""Reason of `Balanced` False for each cause."""


class Condition(Record):
    """One condition in the form of the Kubernetes API."""

    type: str = Field(max_length=64)
    status: ConditionStatus
    observed_generation: int = 0
    last_transition_time: str = Field(max_length=64, json_schema_extra={"format": "date-time"})
    reason: str = Field(max_length=64)
    message: str = Field(default="", max_length=1024)


def set_condition(
    conditions: Sequence[Condition],
    kind: ConditionType,
    is_true: bool | None,
    *,
    reason: Reason,
    message: str = "",
    generation: int,
    now: str,
) -> tuple[Condition, ...]:
    """Sets one condition; null means Unknown. The transition time changes only with the status."""
    status: ConditionStatus = "Unknown" if is_true is None else "True" if is_true else "False"
    previous = next((c for c in conditions if c.type == kind), None)
    content = (status, generation, reason.value, message[:1024])
    if previous is not None and (previous.status, previous.observed_generation, previous.reason, previous.message) == content:
        return tuple(conditions)  # creating a model is slow
    since = previous.last_transition_time if previous and previous.status == status else now
    new = Condition(
        type=kind,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason.value,
        message=message[:1024],
    )
    if previous is None:
        return (*conditions, new)
    return tuple(new if c.type == kind else c for c in conditions)


def drop_condition(conditions: Sequence[Condition], kind: ConditionType) -> tuple[Condition, ...]:
    """Returns the conditions without one type."""
    return tuple(c for c in conditions if c.type != kind)


def find_condition(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Returns the condition of this type, if present."""
    return next((c for c in conditions if c.type == kind), None)
