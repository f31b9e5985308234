"""An operator over an API server in memory, for tests of whole reconciles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx_api.conditions import ConditionType, find_condition
from phalanx_api.status import Status
from phalanx_operator.apply.executor import ActionExecutor
from phalanx_operator.kube.client import EVENTS, INFERENCE_SERVICES, PODS, STATEFUL_SETS, Json
from phalanx_operator.kube.store import Key
from phalanx_operator.loop.placement_queue import PlacementGate, PlacementQueue
from phalanx_operator.loop.reconcile import AGAIN_S, Clocks, Reconciler, Sources
from phalanx_operator.loop.reporting import EventRecorder, StatusReporter
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe.api_discovery import SchedulerDiscovery
from phalanx_operator.observe.certificate import RouterCertificates
from phalanx_operator.observe.observe import Children
from phalanx_operator.observe.pod_failure import PodRejections
from phalanx_operator.observe.service_cache import ManifestCache, ServiceCache
from phalanx_operator.render.objects import Images
from tests.control.builders import NOW, check_fields, make_body
from tests.control.condition_table import ALLOWED, verdicts
from tests.control.fake_kube import FakeCluster, FakeKube, FakeRouters
from tests.control.kstatus import kstatus

KEY = ("team", "chat")
IMAGES = Images("runtime:1", "router:1")


class World:
    """An operator and its cluster. Tests trigger every step."""

    def __init__(
        self,
        kube: FakeKube | None = None,
        images: Images = IMAGES,
        manifests: ManifestCache | None = None,
        write_interval_s: float = 0.0,
        draw: float = 0.0,
        private_sources: tuple[str, ...] = (),
        **spec: Any,
    ) -> None:
        self.kube = kube or FakeKube()
        self.clock = 0.0
        self.children = Children()
        self.cluster = FakeCluster(self.kube, self.children)
        self.metrics = Metrics()
        self.routers = FakeRouters()
        self.now = NOW
        self.kube.now = lambda: self.now
        self.clock_reason = ""
        self.woken: list[Key] = []

        def clock() -> float:
            return self.clock

        services = ServiceCache()
        self.reconciler = Reconciler(
            client=self.kube,
            sources=Sources(
                children=self.children,
                rejections=PodRejections(self.kube, clock=clock),
                routers=self.routers,
                certificates=RouterCertificates(self.kube, clock=clock),
                services=services,
                manifests=manifests or ManifestCache(),
            ),
            placement=PlacementGate(
                schedulers=SchedulerDiscovery(self.kube, clock=clock), wake=lambda key: self.woken.append(key), clock=clock
            ),
            executor=ActionExecutor(
                self.kube,
                self.children,
                images,
                lambda: "drawn",
                private_sources=private_sources,
                clock=clock,
                draw=lambda: draw,
            ),
            reporter=StatusReporter(
                client=self.kube,
                services=services,
                events=EventRecorder(self.kube, "me"),
                metrics=self.metrics,
                clock=clock,
                write_interval_s=write_interval_s,
            ),
            clocks=Clocks(lambda: self.now, clock, lambda: self.clock_reason),
        )
        if spec or kube is None:
            body = make_body(**spec)
            for field in [field for field, value in body["spec"].items() if value is None]:
                del body["spec"][field]
            check_fields(body["spec"])
            self.kube.put(INFERENCE_SERVICES, body)

    @property
    def queue(self) -> PlacementQueue:
        return self.reconciler.placement.queue

    def draw_pauses(self, draw: Callable[[], float]) -> PlacementQueue:
        """Replaces the placement queue by one with these random numbers."""
        queue = PlacementQueue(draw)
        self.reconciler = replace(self.reconciler, placement=replace(self.reconciler.placement, queue=queue))
        return queue

    async def reconcile(self) -> list[str]:
        """Returns the writes of one reconcile, and of one that continues it.

        A reconcile that only reports must write nothing when it is repeated, except with an autoscaler.
        """
        self.cluster.sync_informers()
        before = len(self.kube.calls)
        try:
            self.next_s = await self.reconciler.reconcile(KEY)
            if self.next_s == AGAIN_S:
                self.cluster.sync_informers()
                self.next_s = await self.reconciler.reconcile(KEY)
        finally:
            self.check_conditions()
        writes = self.kube.calls[before:]
        only_reports = all("inferenceservices/status" in write or " events " in write for write in writes)
        if writes and only_reports and "autoscaling" not in self.service["spec"]:
            await self.reconciler.reconcile(KEY)
            assert self.kube.calls[before:] == writes
        return writes

    def check_conditions(self) -> None:
        """Fails for conditions outside `condition_table`, and where kstatus contradicts `Ready` or depends on their order."""
        service = self.kube.of_kind(INFERENCE_SERVICES).get("chat", {"metadata": {"generation": 0}})
        found = verdicts(Status.model_validate(service.get("status", {})).conditions)
        assert found <= ALLOWED
        assert kstatus(service) != "Failed" or not any(verdict.startswith("Ready True") for verdict in found)
        assert not {"Reconciling", "Stalled"} <= {verdict.split()[0] for verdict in found}

    async def settle(self, reconciles: int = 12) -> None:
        """Starts pods and routers and reconciles until nothing is written."""
        for _ in range(reconciles):
            self.cluster.start_pods()
            self.cluster.start_routers()
            if not (writes := await self.reconcile()):
                return
        raise AssertionError(f"still writing: {writes}")

    async def change(self, **spec: Any) -> None:
        body = self.service
        check_fields(body["spec"] | spec)
        self.kube.put(INFERENCE_SERVICES, body | {"spec": body["spec"] | spec})

    @property
    def service(self) -> Json:
        return self.kube.of_kind(INFERENCE_SERVICES)["chat"]

    @property
    def status(self) -> Status:
        return Status.model_validate(self.service["status"])

    @property
    def ready(self) -> tuple[str, str]:
        return self.condition("Ready")

    @property
    def groups(self) -> set[str]:
        return set(self.kube.of_kind(STATEFUL_SETS))

    def events(self) -> list[tuple[str, str]]:
        """Returns type and reason of each event."""
        return [(e["type"], e["reason"]) for e in self.kube.of_kind(EVENTS).values()]

    async def crash(self, termination: str) -> Json:
        """Lets all pods end with a termination message. Returns the service and the events after the operator has looked."""
        self.cluster.start_pods(ready=False, reason="CrashLoopBackOff")
        for pod in list(self.kube.of_kind(PODS).values()):
            for container in pod["status"].get("containerStatuses", ()):
                container["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error", "message": termination}}
            self.kube.put(PODS, pod)
        await self.reconcile()
        return {"service": self.service, "events": list(self.kube.of_kind(EVENTS).values())}

    def condition(self, kind: ConditionType) -> tuple[str, str]:
        condition = find_condition(self.status.conditions, kind)
        assert condition is not None
        return condition.status, condition.reason

    def draining(self) -> dict[str, str]:
        """Returns the drain annotations of existing groups by name."""
        marks = {
            name: body["metadata"].get("annotations", {}).get("phalanx.dev/draining")
            for name, body in self.kube.of_kind(STATEFUL_SETS).items()
        }
        return {name: mark for name, mark in marks.items() if mark and name not in self.deleted()}

    def deleted(self) -> set[str]:
        """Returns the groups that are being deleted."""
        return {name for name, body in self.kube.of_kind(STATEFUL_SETS).items() if "deletionTimestamp" in body["metadata"]}
