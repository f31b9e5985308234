"""An operator over an API server in memory, for tests of whole looks."""

from typing import Any

from phalanx_api.conditions import ConditionType, find_condition
from phalanx_api.status import Status
from phalanx_operator.apply.executor import ActionExecutor
from phalanx_operator.kube.client import EVENTS, SERVICES_OF_OURS, STATEFUL_SETS, Json
from phalanx_operator.kube.events import EventRecorder
from phalanx_operator.loop.reconcile import Reconciler
from phalanx_operator.metrics import Metrics
from phalanx_operator.observe.api_discovery import SchedulerDiscovery
from phalanx_operator.observe.observe import Children
from phalanx_operator.observe.pod_failure import ImageRefusals
from phalanx_operator.observe.service_cache import Manifests
from phalanx_operator.render.objects import Images
from tests.control.builders import NOW, make_body, refuse_strangers
from tests.control.fake_kube import FakeCluster, FakeKube, FakeRouters
from tests.control.kstatus import kstatus
from tests.control.said import SAID, said

KEY = ("team", "chat")
IMAGES = Images("runtime:1", "router:1")


class World:
    """An operator and its cluster. Nothing happens by itself."""

    def __init__(
        self,
        kube: FakeKube | None = None,
        images: Images = IMAGES,
        manifests: Manifests | None = None,
        pace_s: float = 0.0,
        draw: float = 0.0,
        **spec: Any,
    ) -> None:
        self.kube = kube or FakeKube()
        self.clock = 0.0
        self.children = Children()
        self.cluster = FakeCluster(self.kube, self.children)
        hands = ActionExecutor(self.kube, self.children, images, lambda: "drawn", clock=lambda: self.clock, draw=lambda: draw)
        self.metrics = Metrics()
        self.routers = FakeRouters()
        self.now = NOW
        offers, refusals = (
            SchedulerDiscovery(self.kube, clock=lambda: self.clock),
            ImageRefusals(self.kube, clock=lambda: self.clock),
        )
        self.reconciler = Reconciler(
            client=self.kube,
            children=self.children,
            hands=hands,
            notes=EventRecorder(self.kube, "me"),
            metrics=self.metrics,
            routers=self.routers,
            offers=offers,
            refusals=refusals,
            manifests=manifests or Manifests(),
            now=lambda: self.now,
            clock=lambda: self.clock,
            pace_s=pace_s,
        )
        if spec or kube is None:
            body = make_body(**spec)
            for field in [field for field, value in body["spec"].items() if value is None]:
                del body["spec"][field]
            refuse_strangers(body["spec"])
            self.kube.put(SERVICES_OF_OURS, body)

    async def look(self) -> list[str]:
        """One look; the writes that it made. One that wrote only a status would write nothing if it came again at once: that is
        why nobody is woken by it. (Where there is an autoscaler it comes again every few seconds.)"""
        self.cluster.tell()
        before = len(self.kube.calls)
        try:
            self.next_s = await self.reconciler.reconcile(KEY)
        finally:
            self.refuse_strange_words()
        writes = self.kube.calls[before:]
        only_told = all("inferenceservices/status" in write or " events " in write for write in writes)
        if writes and only_told and "autoscaling" not in self.service["spec"]:
            await self.reconciler.reconcile(KEY)
            assert self.kube.calls[before:] == writes
        return writes

    def refuse_strange_words(self) -> None:
        """Fails where a condition says what it may not: then tests/control/said.py lacks it, and so do the cases there. Also
        where kstatus would call a service that is ready failed, or what it reads hangs on the order of the conditions."""
        service = self.kube.of(SERVICES_OF_OURS).get("chat", {"metadata": {"generation": 0}})
        words = said(Status.model_validate(service.get("status", {})).conditions)
        assert words <= SAID
        assert kstatus(service) != "Failed" or not any(one.startswith("Ready True") for one in words)
        assert not {"Reconciling", "Stalled"} <= {one.split()[0] for one in words}

    async def settle(self, looks: int = 12) -> None:
        """Looks while the cluster does its part, until nothing is written any more."""
        for _ in range(looks):
            self.cluster.start_pods()
            self.cluster.start_routers()
            if not (writes := await self.look()):
                return
        raise AssertionError(f"still writing: {writes}")

    async def change(self, **spec: Any) -> None:
        body = self.service
        refuse_strangers(body["spec"] | spec)
        self.kube.put(SERVICES_OF_OURS, body | {"spec": body["spec"] | spec})

    @property
    def service(self) -> Json:
        return self.kube.of(SERVICES_OF_OURS)["chat"]

    @property
    def status(self) -> Status:
        return Status.model_validate(self.service["status"])

    @property
    def ready(self) -> tuple[str, str]:
        condition = find_condition(self.status.conditions, "Ready")
        assert condition is not None
        return condition.status, condition.reason

    @property
    def groups(self) -> set[str]:
        return set(self.kube.of(STATEFUL_SETS))

    def notes(self) -> list[tuple[str, str]]:
        return [(e["type"], e["reason"]) for e in self.kube.of(EVENTS).values()]

    def condition(self, kind: ConditionType) -> tuple[str, str]:
        condition = find_condition(self.status.conditions, kind)
        assert condition is not None
        return condition.status, condition.reason

    def draining(self) -> dict[str, str]:
        """What is noted on groups that are being emptied and exist, by name."""
        there = self.kube.of(STATEFUL_SETS)
        notes = {name: body["metadata"].get("annotations", {}).get("phalanx.dev/draining") for name, body in there.items()}
        gone = {name for name, body in there.items() if "deletionTimestamp" in body["metadata"]}
        return {name: note for name, note in notes.items() if note and name not in gone}

    def deleted(self) -> set[str]:
        """Groups that are being deleted."""
        return {name for name, body in self.kube.of(STATEFUL_SETS).items() if "deletionTimestamp" in body["metadata"]}
