"""What a dashboard shows, independent of Grafana's schema."""

from dataclasses import dataclass
from typing import Literal

RATE = "$__rate_interval"
"""Grafana's range for `rate`: at least four scrapes."""
SERVICES = 'namespace=~"$namespace",phalanx_dev_service=~"$service"'
"""Selects the series of routers and groups of the chosen services: labels that their ServiceMonitor adds."""
GROUPS = f'{SERVICES},phalanx_dev_group=~"$group"'
"""Selects the series of the chosen groups."""
STATUS = 'namespace=~"$namespace",service=~"$service"'
"""Selects the operator's series of the chosen services, whose labels `honorLabels` of its ServiceMonitor keeps."""

Unit = Literal["short", "s", "percentunit", "reqps", "ops", "bytes", "watt", "none"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph. `good`: what a healthy service shows, and what to do otherwise."""

    title: str
    shows: str
    good: str
    unit: Unit
    queries: tuple[Query, ...]

    @property
    def description(self) -> str:
        """Text behind the panel's info sign."""
        return f"{self.shows} Good: {self.good}"


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down list of the values of a label; several may be chosen."""

    name: str
    series: str
    label: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """Vertical lines where the expression has samples."""

    title: str
    expr: str
    colour: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. `uid` is part of its address in Grafana."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    def panels(self) -> tuple[Panel, ...]:
        """All panels."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def expressions(self) -> tuple[str, ...]:
        """The expressions of panels, annotations and variables."""
        queries = [query.expr for panel in self.panels() for query in panel.queries]
        return (*queries, *(annotation.expr for annotation in self.annotations), *(each.series for each in self.variables))


def quantile(share: float, histogram: str, selector: str, *by: str) -> str:
    """Returns the expression of a quantile of a histogram, per combination of the labels `by`."""
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{{selector}}}[{RATE}])))"


def rate(counter: str, selector: str, *by: str) -> str:
    """Returns the expression of a counter's rate, summed per combination of the labels `by`."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate({counter}{{{selector}}}[{RATE}]))"


def ratio(part: str, whole: str) -> str:
    """Returns the quotient of two expressions, without a result where the whole is 0."""
    return f"{part} / ({whole} > 0)"


NAMESPACE = Variable("namespace", "phalanx_router_groups_known", "namespace")
SERVICE = Variable("service", 'phalanx_router_groups_known{namespace=~"$namespace"}', "phalanx_dev_service")
GROUP = Variable("group", f"phalanx_num_requests_running{{{SERVICES}}}", "phalanx_dev_group")
