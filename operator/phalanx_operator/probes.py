"""The operator's own HTTP endpoint: /healthz, /readyz and /metrics.

Healthy means that it works, not that it has a socket: the watches were heard lately. A look at a service ends by itself.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from phalanx_operator.metrics import Metrics


class Health:
    """What keeps the operator from being healthy or ready, as sentences. `stalls` is asked at each probe."""

    def __init__(self) -> None:
        self.stalls: Callable[[], list[str]] = list
        self.ready = False


def make_app(health: Health, metrics: Metrics) -> web.Application:
    """The endpoint."""

    async def healthz(_: web.Request) -> web.Response:
        wrong = health.stalls()
        return web.Response(status=503 if wrong else 200, text="; ".join(wrong) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if health.ready else 503, text="ok" if health.ready else "starting")

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", show_metrics)])
    return app


async def serve(app: web.Application, port: int) -> web.AppRunner:
    """The running server; its owner calls `cleanup` on it."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
