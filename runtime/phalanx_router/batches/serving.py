"""Adds the Batch API to a router."""

import time
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge

from phalanx_frontend.auth.api_keys import ApiKeys
from phalanx_frontend.fields import ERRORS
from phalanx_router.backend import RouterBackend
from phalanx_router.batches.batch_run import RunParts
from phalanx_router.batches.local_call import call
from phalanx_router.batches.routes import batch_routes
from phalanx_router.batches.runner import SCAN_S, BatchRunner
from phalanx_router.batches.slots import Slots, spare_requests
from phalanx_router.batches.store import BatchStore
from phalanx_router.settings import BatchSettings


def add_batches(
    app: FastAPI, backend: RouterBackend, keys: ApiKeys, settings: BatchSettings, registry: CollectorRegistry
) -> BatchRunner:
    """Adds the routes; returns what runs the batches. Raises OSError."""
    store = BatchStore(settings.folder, settings.max_bytes)
    slots = Slots(partial(_spare, backend))
    parts = RunParts(store=store, call=partial(call, app), slots=slots, now=time.time, save_s=SCAN_S, keep_quota=keys.keep_quota)
    runner = BatchRunner(parts, is_leaving=lambda: backend.is_draining)
    app.include_router(batch_routes(store), responses=ERRORS)
    running = Gauge("phalanx_router_batches_running", "Batches that this router runs.", registry=registry)
    running.set_function(lambda: runner.num_running)
    in_flight = Gauge("phalanx_router_batch_requests_in_flight", "Requests of batches in progress.", registry=registry)
    in_flight.set_function(lambda: slots.in_flight)
    return runner


def _spare(backend: RouterBackend, in_flight: int) -> int:
    links = backend.links
    views = links.fleet_view.views(links.serving())
    policy = backend.balancing.policy
    return spare_requests(
        views,
        queued=len(backend.dispatcher.queue),
        in_flight=in_flight,
        itl_target_s=policy.itl_target_s or 0.0,
        routers=policy.routers,
    )
