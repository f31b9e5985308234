"""Assembles the operator: lease, informers, kopf and workers. The end of any part ends the process."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import time

import aiohttp
import kopf

from phalanx_operator import metrics as probes
from phalanx_operator.apply.executor import ActionExecutor
from phalanx_operator.decide.pacing import CALM_S
from phalanx_operator.kube.client import DEPLOYMENTS, NODES, PODS, SERVICES, STATEFUL_SETS, KubeClient
from phalanx_operator.kube.events import EventRecorder
from phalanx_operator.kube.http import SILENCE_S, HttpKube, connect
from phalanx_operator.kube.informer import Informer, read_event, silence_s
from phalanx_operator.lease import Lease
from phalanx_operator.loop import handlers
from phalanx_operator.loop.reconcile import Reconciler
from phalanx_operator.loop.worker import Loop
from phalanx_operator.metrics import CountingKube, Metrics
from phalanx_operator.observe.api_discovery import SchedulerDiscovery
from phalanx_operator.observe.observe import Children
from phalanx_operator.observe.pod_failure import ImageRefusals
from phalanx_operator.observe.service_cache import ServiceCache
from phalanx_operator.render.network import Neighbours
from phalanx_operator.render.objects import Images
from phalanx_operator.routers import RouterPoller
from phalanx_operator.settings import Settings

log = logging.getLogger(__name__)


class StopRequested(Exception):
    """The operator received a signal to stop."""


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises the error that ended it otherwise, after releasing the lease."""
    metrics, health = Metrics(), probes.Health()
    client = await connect()
    endpoint = await probes.serve(probes.make_app(health, metrics), settings.port)
    kube = CountingKube(HttpKube(client, read_event=read_event), metrics)
    http = aiohttp.ClientSession()
    identity = settings.pod_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    lease = Lease(kube, settings.lease_namespace, identity, lease_s=settings.lease_seconds)
    asking: RouterPoller | None = None
    services = ServiceCache()
    stop = asyncio.Event()
    _hear_signals(stop)
    try:
        async with asyncio.TaskGroup() as tasks:
            leading: list[asyncio.Task[None]] = []
            tasks.create_task(_end_when(stop, leading, lease))
            loop, informers, asking = _assemble(settings, kube, http=http, identity=identity, metrics=metrics, services=services)
            health.stalls = lambda: _stalls(informers)
            for informer in informers:
                tasks.create_task(informer.run())
            for informer in informers:
                await informer.synced.wait()
            health.ready = True  # a standby has all objects and can lead at once
            await lease.acquire()
            metrics.is_leader.set(1)
            leading += [tasks.create_task(lease.keep()), tasks.create_task(loop.work(settings.workers))]
            tasks.create_task(_watch_services(settings, loop, services, stop))
    except* StopRequested:
        log.info("stopped")
    finally:
        await lease.give_back()
        if asking is not None:
            await asking.close()
        await http.close()
        await endpoint.cleanup()
        await client.close()


async def _end_when(stop: asyncio.Event, leading: list["asyncio.Task[None]"], lease: Lease) -> None:
    """Stops the workers first, then releases the lease: the next leader need not wait for kopf, whose end takes seconds. Raises
    StopRequested."""
    await stop.wait()
    if leading:
        for task in leading:
            task.cancel()
        await asyncio.gather(*leading, return_exceptions=True)
        await lease.give_back()
    raise StopRequested


def _assemble(
    settings: Settings, kube: KubeClient, http: aiohttp.ClientSession, identity: str, metrics: Metrics, services: ServiceCache
) -> tuple[Loop, list[Informer], RouterPoller]:
    """Returns the work loop, which only a leader runs, and the informers, which every replica runs."""
    children = Children()
    images = Images(settings.runtime_image, settings.router_image)
    neighbours = Neighbours(settings.lease_namespace, settings.prometheus_namespace)
    hands = ActionExecutor(kube, children, images, lambda: secrets.token_hex(32), neighbours=neighbours)
    asking = RouterPoller(kube, http, lambda key: loop.wake(key))
    notes, offers, refusals = EventRecorder(kube, identity), SchedulerDiscovery(kube), ImageRefusals(kube)
    reconciler = Reconciler(
        client=kube,
        children=children,
        hands=hands,
        notes=notes,
        metrics=metrics,
        routers=asking,
        offers=offers,
        refusals=refusals,
        known=services,
        wake=lambda key: loop.wake(key, after_s=0.0),
    )
    loop = Loop(reconciler.reconcile, metrics)
    informers = [
        Informer(kube, resource, namespace, store, loop.wake, later=lambda key: loop.wake(key, CALM_S))
        for namespace in settings.namespaces or (None,)
        for resource, store in (
            (PODS, children.pods),
            (STATEFUL_SETS, children.sets),
            (DEPLOYMENTS, children.deployments),
            (SERVICES, children.services),
        )
    ]
    if not settings.namespaces:  # nodes are cluster-scoped, and watching them needs a cluster role
        informers.append(Informer(kube, NODES, None, children.nodes, loop.wake, selector=""))
    for resource in {informer.resource for informer in informers}:
        age = metrics.watch_age.labels(resource.plural)
        age.set_function(lambda resource=resource: silence_s(informers, resource, time.monotonic()))  # type: ignore[misc]
    return loop, informers, asking


async def _watch_services(settings: Settings, loop: Loop, services: ServiceCache, stop: asyncio.Event) -> None:
    """Runs kopf until `stop`. kopf handles signals itself after its start, and would stop slowly before all other parts."""
    handlers.quiet()
    ready = asyncio.Event()
    watching = kopf.operator(
        registry=handlers.registry(lambda key: loop.wake(key, after_s=0.0), services),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        ready_flag=ready,
        stop_flag=stop,
    )
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(watching)
        ended.add_done_callback(lambda _: ready.set())  # it may end before it is ready
        await ready.wait()
        _hear_signals(stop)
        await ended
    stop.set()


def _hear_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def _stalls(informers: list[Informer]) -> list[str]:
    """Returns the watches without data for far too long that did not restart."""
    now = time.monotonic()
    return [
        f"no data of {informer.resource.plural} for {now - informer.heard_at:.0f} s"
        for informer in informers
        if now - informer.heard_at > 4 * SILENCE_S
    ]
