"""Every type, status and reason that a condition may have. `World` checks what the operator writes."""

from collections.abc import Iterable

from phalanx_api.conditions import Condition

_TABLE = """
Ready             True     Ready Suspended ScaledToZero
Ready             False    SpecInvalid Rejected QuotaExceeded ImagePullFailed PodFailing InsufficientCapacity
Ready             False    RestartBudgetSpent RollingOut GroupsNotReady Unreachable RouterNotReady RolledBack
Available         True     Serving NodesSilent Unreachable
Available         False    NoReadyGroup Holding RouterNotReady
Progressing       True     Complete Rolling Scaling SurgeUnschedulable
Progressing       False    ProgressDeadlineExceeded SpecInvalid Rejected QuotaExceeded RolledBack
Progressing       Unknown  Paused
Reconciling       True     Rolling Scaling SurgeUnschedulable Retrying
Stalled           True     ProgressDeadlineExceeded RestartBudgetSpent SpecInvalid Rejected QuotaExceeded RolledBack
RouterReady       True     Ready
RouterReady       False    RouterNotReady Rejected
CertificateValid  True     Valid
CertificateValid  False    NotFound InvalidCertificate Expired
CapacityAvailable True     Scheduled
CapacityAvailable False    Unschedulable GangWaiting QuotaExceeded Rejected
ModelCached       True     Cached
ModelCached       False    AuthFailed NotFound ClaimUnbound
ModelCached       Unknown  Downloading
ScalingActive     True     Active External Advisory
ScalingActive     False    MetricsUnavailable ConflictingScaler Disabled
Balanced          True     Balanced
Balanced          False    FleetSaturated KvBound PrefillBound DecodeBound PrefixSkew Straggler ImminentFull
Balanced          Unknown  RoutersSilent
Compatible        True     VersionsAgree
Compatible        False    UnknownVersion
Speculating       True     Proposing
Speculating       False    DraftLost
Speculating       Unknown  NoReadyGroup
DevicesHealthy    True     Healthy
DevicesHealthy    False    DeviceFault DeviceThrottled
ControlPlanePartitioned True NodesSilent
DisruptionsHeld   True     StragglersTogether RestartsTogether ClockChanged
CacheSized        True     WorkingSetFits
CacheSized        False    TooFewPages TooFewHostPages
CacheSized        Unknown  TooFewLookups
AdaptersReady     True     AdaptersUsable
AdaptersReady     False    AdapterRefused AdapterFailing
AdaptersReady     Unknown  NoReadyGroup
"""
ALLOWED = {
    f"{kind} {status} {reason}" for kind, status, *reasons in map(str.split, _TABLE.split("\n")[1:-1]) for reason in reasons
}


def verdicts(conditions: Iterable[Condition]) -> set[str]:
    """Returns texts such as `Ready False PodFailing`."""
    return {f"{condition.type} {condition.status} {condition.reason}" for condition in conditions}
