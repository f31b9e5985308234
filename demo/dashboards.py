"""Serves the dashboards of the installation as pages, from a Prometheus."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, RedirectResponse

from bench.frame.prometheus import Prometheus
from demo.curves import Curve, Drawn, curves, page
from tools.dashboards.build import DASHBOARDS
from tools.dashboards.records import Dashboard

SHOWN_S, POINTS, REFRESH_S = 300.0, 100, 10
RATE_S = 20
"""Replaces Grafana's `$__rate_interval`, at scrapes of two seconds."""


def chosen(expression: str, variables: Mapping[str, str]) -> str:
    """Returns an expression with Grafana's variables replaced; a variable without a value selects everything."""
    values = {"__rate_interval": f"{RATE_S}s", "namespace": ".*", "service": ".*", "group": ".*", **variables}
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(f"${name}", values[name])
    return expression


def starts(points: Sequence[tuple[float, float]], step_s: float) -> list[float]:
    """Returns the times at which samples begin after a gap, for points of a range query of that step."""
    times = [at_s for at_s, _ in points]
    return [at_s for before_s, at_s in zip([float("-inf"), *times], times, strict=False) if at_s - before_s > 1.5 * step_s]


def drawn(dashboard: Dashboard, prometheus: Prometheus, variables: Mapping[str, str], now_s: float) -> Drawn:
    """Returns the last minutes of a dashboard. Raises Failed or httpx.HTTPError without Prometheus."""
    start_s, step_s = now_s - SHOWN_S, SHOWN_S / POINTS
    found: dict[str, list[Curve]] = {}
    for panel in dashboard.panels():
        for query in panel.queries:
            series = prometheus.series(chosen(query.expr, variables), start_s, now_s, step_s)
            found.setdefault(panel.title, []).extend(curves(query.legend, series))
    marks: dict[str, list[float]] = {}
    for annotation in dashboard.annotations:
        lines = prometheus.series(chosen(annotation.expr, variables), start_s, now_s, step_s)
        marks[annotation.title] = [at_s for line in lines for at_s in starts(line.points, step_s)]
    return Drawn(found, marks, start_s, now_s)


def make_app(prometheus: Prometheus, namespace: str) -> FastAPI:
    """Returns the application: a page for each dashboard, by its uid. Panels show the services of `namespace`."""
    app = FastAPI(openapi_url=None)
    by_uid = {dashboard.uid: dashboard for dashboard in DASHBOARDS}
    links = {dashboard.title: f"/{dashboard.uid}" for dashboard in DASHBOARDS}

    @app.get("/")
    def first() -> RedirectResponse:
        return RedirectResponse(f"/{DASHBOARDS[0].uid}")

    @app.get("/{uid}")
    async def show(uid: str) -> HTMLResponse:
        if uid not in by_uid:
            return HTMLResponse("There is no such dashboard.", 404)
        dashboard = by_uid[uid]
        shown = await asyncio.to_thread(drawn, dashboard, prometheus, {"namespace": namespace}, time.time())
        alerts = sorted(await asyncio.to_thread(prometheus.firing))
        return HTMLResponse(page(dashboard, links, shown, alerts, REFRESH_S))

    return app
