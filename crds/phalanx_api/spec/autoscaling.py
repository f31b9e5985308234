"""How many groups a service may have and what they are to reach: `spec.autoscaling`. The rule is in docs/scaling.md.

Times and steps that are not given are those of the rule; given ones are taken as they are.
"""

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
        raise ValueError(f"there is no time zone {name!r}") from error
    return name


class Targets(Record):
    """What clients shall get, and how full groups may be. The target that needs most groups decides."""

    model_config = Record.model_config | rules(
        rule(
            "has(self.ttftP95Ms) || has(self.itlP95Ms) || has(self.kvUtilization)",
            "give at least one of ttftP95Ms, itlP95Ms and kvUtilization",
        )
    )
    ttft_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """Time to the first token, which 95 of 100 requests shall not exceed."""
    itl_p95_ms: int | None = Field(default=None, ge=1, le=3_600_000)
    """Time between two tokens of a stream, which 95 of 100 shall not exceed."""
    kv_utilization: int | None = Field(default=None, ge=1, le=100)
    """Percent of a group's KV pages that may be in use; 80 otherwise."""

    @model_validator(mode="after")
    def _any(self) -> "Targets":
        if self.ttft_p95_ms is None and self.itl_p95_ms is None and self.kv_utilization is None:
            raise ValueError("give at least one of ttftP95Ms, itlP95Ms and kvUtilization")
        return self


class ScaleUp(Record):
    """How fast groups are added."""

    stabilization_seconds: int = Field(default=0, ge=0, le=3600)
    """For how long more groups must be needed before any is added; two evaluations in any case."""
    max_step: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Most groups added in 15 s; otherwise as many as there are, or 4 if that is more."""


class ScaleDown(Record):
    """How fast groups are taken away."""

    stabilization_seconds: int | None = Field(default=None, ge=0, le=86_400)
    """For how long one group less must do; 300 otherwise, or 60 where streams move and none was added for five minutes."""
    max_step: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Most groups taken away in 60 s; otherwise a tenth of them, and at least 1."""


class Schedule(Record):
    """Bounds that hold from the times of a cron expression until those of another one fire."""

    model_config = Record.model_config | rules(
        rule("has(self.min) || has(self.max)", "give min, max or both"),
        rule("!has(self.min) || !has(self.max) || self.min <= self.max", "min must not be greater than max", ".min"),
    )
    cron: Annotated[str, AfterValidator(_cron)] = Field(min_length=9, max_length=128, pattern=CRON_PATTERN)
    """Minute, hour, day of the month, month, day of the week."""
    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="UTC", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_+/-]+$"
    )
    """Name in the IANA database, such as Europe/Berlin."""
    min: int | None = Field(default=None, ge=0, le=MAX_GROUPS)
    """Instead of minReplicas."""
    max: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Instead of maxReplicas."""

    @model_validator(mode="after")
    def _ordered(self) -> "Schedule":
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min must not be greater than max")
        return self


class ScaleToZero(Record):
    """Whether an idle service keeps no group, and what routers do with requests that wake it."""

    enabled: bool = False
    idle_seconds: int | None = Field(default=None, ge=1, le=604_800)
    """For how long no request may have come; otherwise 300, or three times what a group takes to start if that is more."""
    max_held_requests: int = Field(default=100, ge=1, le=100_000)
    """Requests that each router holds while no group is there; more are told 503."""
    hold_timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """How long a request is held."""


_NEEDS_FALLBACK = "fallbackReplicas goes with onMetricsLoss Fallback, which needs it"
_FALLBACK_FITS = "fallbackReplicas must not be greater than maxReplicas"


class Autoscaling(Record):
    """Who decides how many groups run, and between which bounds."""

    model_config = Record.model_config | rules(
        rule("self.minReplicas <= self.maxReplicas", "minReplicas must not be greater than maxReplicas", ".minReplicas"),
        rule(
            "self.minReplicas >= 1 || (has(self.scaleToZero) && self.scaleToZero.enabled)",
            "minReplicas 0 goes with scaleToZero.enabled only",
            ".minReplicas",
        ),
        rule(
            "!has(self.schedules) || self.schedules.all(s, !has(s.min) || s.min >= 1 || "
            "(has(self.scaleToZero) && self.scaleToZero.enabled))",
            "a schedule with min 0 goes with scaleToZero.enabled only",
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
    """Internal: the operator writes spec.replicas. External: HPA or KEDA does, by the metric. Advisory: a person does."""
    min_replicas: int = Field(default=1, ge=0, le=MAX_GROUPS)
    max_replicas: int = Field(ge=1, le=MAX_GROUPS)
    targets: Targets
    scale_up: ScaleUp = Field(default_factory=ScaleUp)
    scale_down: ScaleDown = Field(default_factory=ScaleDown)
    schedules: tuple[Schedule, ...] = Field(default=(), max_length=16)
    """Other bounds at certain times; of those that have fired, the latest holds."""
    scale_to_zero: ScaleToZero = Field(default_factory=ScaleToZero)
    on_metrics_loss: Literal["Hold", "Fallback"] = "Hold"
    """What holds while fewer than half of the routers say what they see. Hold: the count. Fallback: when that has lasted 45 s,
    there are at least `fallbackReplicas`, and never fewer than there were."""
    fallback_replicas: int | None = Field(default=None, ge=1, le=MAX_GROUPS)
    """Fallback: the groups that carry any load that may come."""

    @model_validator(mode="after")
    def _bounds(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not be greater than maxReplicas")
        if self.min_replicas == 0 and not self.scale_to_zero.enabled:
            raise ValueError("minReplicas 0 goes with scaleToZero.enabled only")
        if any(schedule.min == 0 for schedule in self.schedules) and not self.scale_to_zero.enabled:
            raise ValueError("a schedule with min 0 goes with scaleToZero.enabled only")
        return self

    @model_validator(mode="after")
    def _fallback(self) -> "Autoscaling":
        if (self.on_metrics_loss == "Fallback") != (self.fallback_replicas is not None):
            raise ValueError(_NEEDS_FALLBACK)
        if self.fallback_replicas is not None and self.fallback_replicas > self.max_replicas:
            raise ValueError(_FALLBACK_FITS)
        return self
