"""Findings: a cause, its evidence in numbers, the spec field to change, and the predicted effect."""

from typing import Literal, get_args

import msgspec

LimitCause = Literal[
    "cold_start",
    "kv",
    "queue",
    "straggler",
    "router_cpu",
    "network",
    "prefix",
    "speculation",
    "prefill",
    "attention",
    "weights",
    "surplus",
]
"""What limits a service; `surplus`: more groups than the load needs."""
LIMIT_CAUSES: tuple[LimitCause, ...] = get_args(LimitCause)
Unit = Literal["s", "share", "tokens/s", "requests/s", "count", "x", "W", "J"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One number behind a finding."""

    name: str
    value: float
    unit: Unit


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted effect of a change."""

    metric: str
    before: float
    after: float
    unit: Unit

    @property
    def is_visible(self) -> bool:
        """Whether the rounded numbers differ."""
        return number(self.before, self.unit) != number(self.after, self.unit)

    @property
    def text(self) -> str:
        """The effect in words."""
        return f"{self.metric} {number(self.before, self.unit)} -> {number(self.after, self.unit)}"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the spec, a command, or both."""

    field: str = ""
    """Path, such as `spec.replicas`."""
    value: str = ""
    """New value, or what it must express."""
    command: str = ""

    @property
    def text(self) -> str:
        """The advice as a sentence without its end."""
        command = f"Run `{self.command}`" if self.command else ""
        change = f"{'set' if command else 'Set'} {self.field} to {self.value}" if self.field else ""
        return " and ".join(part for part in (command, change) if part)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of the service."""

    cause: LimitCause
    severity: float
    """0 to 1; orders findings."""
    sentence: str
    evidence: list[Evidence]
    advice: Advice
    effect: Effect | None = None
    """Null if no number is known for it."""
    group: str = ""
    """The group, if only one is concerned."""

    @property
    def text(self) -> str:
        """Sentence, change and effect."""
        effect = f": {self.effect.text}" if self.effect and self.effect.is_visible else ""
        return f"{self.sentence}. {self.advice.text}{effect}."


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a service, most severe first, and its state in one sentence."""

    findings: list[Finding]
    state: str
    cost: str = ""
    """What the output costs; empty if there was none."""
    energy: str = ""
    """The energy per output token, and what would lower it; empty if a device does not report its power."""

    @property
    def numbered(self) -> list[str]:
        """One line per finding."""
        return [f"{index}. {finding.cause}: {finding.text}" for index, finding in enumerate(self.findings, 1)]


def order(findings: list[Finding]) -> list[Finding]:
    """Returns the findings, most severe first."""
    return sorted(findings, key=lambda finding: (-finding.severity, LIMIT_CAUSES.index(finding.cause), finding.group))


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number(value: float, unit: Unit) -> str:
    """Returns a value with its unit in words."""
    match unit:
        case "s":
            return f"{_significant(value * 1000, 3)} ms" if value < 0.9995 else f"{_significant(value, 3)} s"
        case "share":
            return f"{value:.0%}"
        case "tokens/s":
            return f"{value:,.0f} tokens/s"
        case "count":
            return f"{value:,.0f}"
        case "x":
            return f"{_significant(value, 2)}x"
        case "W":
            return f"{value:,.0f} W" if value < 10_000 else f"{_significant(value / 1000, 3)} kW"
        case "J":
            return f"{_significant(value, 2)} J"
        case "requests/s":
            return f"{_significant(value, 2)} requests/s"


def _significant(value: float, digits: int) -> str:
    """Returns a number with this many significant digits, or all before the point; never with an exponent."""
    if value < 0.001:
        return "0"
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
