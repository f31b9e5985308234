"""`spec.autoscaling`, see docs/scaling.md."""

import zoneinfo
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from phalanx_api.schema import Record, rule, rules
from phalanx_api.spec.cron import parse_cron

MAX_GROUPS = 1000
CRON_PATTERN = r"^\S+( +\S+){4}$"


def _cron(text: str) -> str:
    parse_cron(text)
    return text


def _zone(name: str) -> str:
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"unknown time zone {name!r}; use an IANA name such as Europe/Berlin") from error
    return name


class Targets(Record):
    """At least one target; the one that needs most groups decides."""

    model_config = Record.model_config | rules(
        rule(
            "has(self.ttftP95Ms) || has(self.itlP95Ms) || has(self.kvUtilization)",
            "give at least one of ttftP95Ms, itlP95Ms and kvUtilization",
        )
    )
    ttft_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """95th percentile of the time to the first token, in ms."""
    itl_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """95th percentile of the time between two tokens of a stream, in ms."""
    kv_utilization: int | None = Field(default=None, ge=1, le=100)
    """Percent of a group's KV pages in use; higher values risk preemptions. Default: 80."""

    @model_validator(mode="after")
    def _any(self) -> "Targets":
        if self.ttft_p95_ms is None and self.itl_p95_ms is None and self.kv_utilization is None:
            raise ValueError("give at least one of ttftP95Ms, itlP95Ms and kvUtilization")
        return self


class ScaleUp(Record):
    """Pace of scale-out."""

    stabilization_seconds: int = Field(default=0, ge=0, le=3600)
    """Time for which more groups must be needed, at least two evaluations of 15 s. Longer ignores short peaks."""
    max_step: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Maximum groups added per 15 s. Default: as many as exist, at least 4."""


class ScaleDown(Record):
    """Pace of scale-in."""

    stabilization_seconds: int | None = Field(default=None, ge=0, le=86_400)
    """Time for which fewer groups must suffice. Default: 300, or 60 if streams can move and the count did not rise for 300 s."""
    max_step: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Maximum groups removed per 60 s. Default: a tenth, at least 1."""


class Schedule(Record):
    """Bounds from one firing of a cron expression until another schedule fires."""

    model_config = Record.model_config | rules(
        rule("has(self.min) || has(self.max)", "give min, max or both"),
        rule("!has(self.min) || !has(self.max) || self.min <= self.max", "min must not be greater than max", ".min"),
    )
    cron: Annotated[str, AfterValidator(_cron)] = Field(min_length=9, max_length=128, pattern=CRON_PATTERN)
    """Minute, hour, day of the month, month, day of the week."""
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_+/-]+$"
    )
    """IANA name, such as Europe/Berlin."""
    min: int | None = Field(default=None, ge=0, le=MAX_GROUPS)
    """Replaces `minReplicas`."""
    max: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Replaces `maxReplicas`."""

    @model_validator(mode="after")
    def _ordered(self) -> "Schedule":
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min must not be greater than max")
        return self


class ScaleToZero(Record):
    """Scaling of an idle service to 0 groups; routers hold requests until a group serves."""

    enabled: bool = False
    idle_seconds: int | None = Field(default=None, ge=1, le=604_800)
    """Time without requests. Default: 300, or three times a group's start time if longer."""
    max_held_requests: int = Field(default=100, ge=1, le=100_000)
    """Requests held by each router; further ones get 503."""
    hold_timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """Maximum hold, then 503; must exceed a group's start time."""


_NEEDS_FALLBACK = "fallbackReplicas is required with onMetricsLoss Fallback and only allowed there"
_FALLBACK_FITS = "fallbackReplicas must not be greater than maxReplicas"


class Autoscaling(Record):
    """Automatic choice of the number of groups."""

    model_config = Record.model_config | rules(
        rule("self.minReplicas <= self.maxReplicas", "minReplicas must not be greater than maxReplicas", ".minReplicas"),
        rule(
            "self.minReplicas >= 1 || (has(self.scaleToZero) && self.scaleToZero.enabled)",
            "minReplicas 0 is only allowed with scaleToZero.enabled",
            ".minReplicas",
        ),
        rule(
            "!has(self.schedules) || self.schedules.all(s, !has(s.min) || s.min >= 1 || "
            "(has(self.scaleToZero) && self.scaleToZero.enabled))",
            "a schedule with min 0 is only allowed with scaleToZero.enabled",
            ".schedules",
        ),
        rule(
            "(self.onMetricsLoss == 'Fallback') == has(self.fallbackReplicas)",
            _NEEDS_FALLBACK,
            ".fallbackReplicas",
        ),
        rule("!has(self.fallbackReplicas) || self.fallbackReplicas <= self.maxReplicas", _FALLBACK_FITS, ".fallbackReplicas"),
    )
    mode: Literal["Internal", "External", "Advisory"] = "Internal"
    """Writer of `replicas`. Internal: the operator. External: HPA or KEDA, from the operator's metric. Advisory: a person."""
    min_replicas: int = Field(default=1, ge=0, le=MAX_GROUPS)
    """Lower bound; 0 requires `scaleToZero.enabled`."""
    max_replicas: int = Field(ge=1, le=MAX_GROUPS)
    """Upper bound; it limits the cost."""
    targets: Targets
    scale_up: ScaleUp = Field(default_factory=ScaleUp)
    scale_down: ScaleDown = Field(default_factory=ScaleDown)
    schedules: tuple[Schedule, ...] = Field(default=(), max_length=16)
    """Bounds at certain times."""
    scale_to_zero: ScaleToZero = Field(default_factory=ScaleToZero)
    on_metrics_loss: Literal["Hold", "Fallback"] = "Hold"
    """Action while fewer than half of the routers report. Hold: keeps the count. Fallback: after 45 s raises it to
    `fallbackReplicas`. The count never falls."""
    fallback_replicas: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Fallback: groups that carry any expected load."""

    @model_validator(mode="after")
    def _bounds(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not be greater than maxReplicas")
        if self.min_replicas == 0 and not self.scale_to_zero.enabled:
            raise ValueError("minReplicas 0 is only allowed with scaleToZero.enabled")
        if any(schedule.min == 0 for schedule in self.schedules) and not self.scale_to_zero.enabled:
            raise ValueError("a schedule with min 0 is only allowed with scaleToZero.enabled")
        return self

    @model_validator(mode="after")
    def _fallback(self) -> "Autoscaling":
        if (self.on_metrics_loss == "Fallback") != (self.fallback_replicas is not None):
            raise ValueError(_NEEDS_FALLBACK)
        if self.fallback_replicas is not None and self.fallback_replicas > self.max_replicas:
            raise ValueError(_FALLBACK_FITS)
        return self
