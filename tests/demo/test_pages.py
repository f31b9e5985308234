"""Dashboards as pages."""

from html.parser import HTMLParser

import pytest

from bench.frame.prometheus import RangeSeries
from demo.curves import Curve, Drawn, amount, curves, page
from demo.dashboards import chosen, starts
from tools.dashboards.build import DASHBOARDS
from tools.dashboards.records import Dashboard, Panel, Query, Row

PANEL = Panel("Queue <s>", "Requests that wait.", "0.", "short", (Query("queue"),))
DASHBOARD = Dashboard("one", "One", "A dashboard.", (), (Row("Row", (PANEL, Panel("Power", "W.", "low.", "watt", ()))),))


class Text(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.words, self.labels = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_panel_shows_its_curves_and_marks() -> None:
    drawn = Drawn({PANEL.title: [Curve("a", [(0.0, 1.0), (30.0, 4.0)])]}, {"Hotspot": [15.0]}, 0.0, 60.0)
    text = Text(page(DASHBOARD, {"One": "/one"}, drawn, ["PhalanxNoRouter"], 10))
    assert text.labels == ["Queue <s>: a 4"]
    assert text.tags.count("polyline") == 1
    assert {"Queue <s>", "Hotspot", "a", "no data", "1 min ago", "Alerts: PhalanxNoRouter"} <= {
        word.strip() for word in text.words
    }
    assert "Requests that wait. Good: 0." in text.words


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.25, "s", "250 ms"),
        (2.5, "s", "2.5 s"),
        (0.256, "percentunit", "26%"),
        (3 * 1024**2, "bytes", "3 MiB"),
        (0.0, "bytes", "0 B"),
        (2.0, "reqps", "2 req/s"),
        (3.0, "ops", "3/s"),
        (700.0, "watt", "700 W"),
        (12.0, "short", "12"),
    ],
)
def test_values_have_units(value: float, unit: str, expected: str) -> None:
    assert amount(value, unit) == expected


def test_curves_are_named_by_labels() -> None:
    found = [RangeSeries({"__name__": "queue", "group": "a", "rank": "0"}, ((0.0, 1.0),)), RangeSeries({"group": "b"}, ())]
    assert [curve.legend for curve in curves("group {{group}}", found)] == ["group a"]
    assert [curve.legend for curve in curves("", found)] == ["a, 0"]


def test_no_variable_of_grafana_remains() -> None:
    for dashboard in DASHBOARDS:
        for expression in dashboard.expressions():
            assert "$" not in chosen(expression, {"namespace": "demo"})
    assert chosen('rate(x{namespace=~"$namespace"}[$__rate_interval])', {"namespace": "n"}) == 'rate(x{namespace=~"n"}[20s])'


def test_a_mark_is_where_samples_begin() -> None:
    assert starts([(0.0, 1.0), (3.0, 1.0), (6.0, 1.0), (30.0, 1.0)], 3.0) == [0.0, 30.0]
    assert starts([], 3.0) == []
