"""The script of a world, and what happened: the looks of its operators with their plans and writes, and the end.

Invariants read nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx_api.spec.autoscaling import Autoscaling
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.decide.state.actions import Action
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, Snapshot
from phalanx_operator.kube.client import Json
from phalanx_operator.kube.store import Key
from tests.control.search.api_server import Written


@dataclass(frozen=True, slots=True)
class Script:
    """A start and its steps."""

    start: tuple[int, int, int, int, int]
    """Replicas, strategy, pods of a group, seconds until a pod is ready, and flags: 1 rollback, 2 gang, 4 two routers, 8 long
    drains."""
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        lines = [("start", self.start), *self.steps]
        return "\n".join(" ".join([name, *map(str, arguments)]) for name, arguments in lines)


def parse(text: str) -> Script:
    """Returns the script. Steps are separated by line ends or `;`."""
    words = [line.split() for line in text.replace(";", "\n").splitlines() if line.strip()]
    (_, *start), *steps = words
    replicas, strategy, pods, start_s, flags = map(int, start)
    rest = tuple((name, tuple(map(int, arguments))) for name, *arguments in steps)
    return Script((replicas, strategy, pods, start_s, flags), rest)


@dataclass(frozen=True, slots=True)
class TrueGroup:
    """A group as it is, whatever operators and routers know."""

    uid: str
    revision: str
    is_live: bool
    """It is not being deleted."""
    is_draining: bool
    is_serving: bool
    streams: int


Truth = Mapping[str, TrueGroup]
"""The groups of the present service, by name."""


@dataclass(frozen=True, slots=True)
class Write:
    """A write, and the groups before and after it."""

    call: Written
    before: Truth
    after: Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeen:
    """The plan of a look, as the executor got it."""

    service: InferenceService
    """The effective one, so the former one during a rollback."""
    revision: str
    snapshot: Snapshot
    actions: tuple[Action, ...]
    fleet: Fleet
    now: str
    """Time of the operator."""
    ordered: int | None
    """Groups that a user or HPA wanted last, as of the service that the operator read; None if an operator wrote it since."""


@dataclass(slots=True, kw_only=True)
class Look:
    """One reconcile. `plan` is missing for an invalid or deleted service, and if the operator failed before it decided."""

    at: float
    operator: str
    key: Key
    """Of the service."""
    before: Truth
    plan: PlanSeen | None = None
    writes: list[Write] = field(default_factory=list)
    service: Json | None = None
    """After it."""
    error: str = ""
    taken: frozenset[str] = frozenset()
    """UIDs of the groups that operators have drained or deleted, whether they received the answer or not."""
    created: frozenset[str] = frozenset()
    """UIDs of the groups that this operator has created before, as far as it received the answers."""
    is_calm: bool = False
    """Nothing fails any more."""
    has_frozen_router: bool = False
    activities: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """When the last activity of each router that runs and reports began, and was seen last, by UID."""
    raised_at: float | None = None
    """When this operator last raised the count of the service."""
    ignored_by: Sequence[str] = ()
    """UIDs of routers that answered, and follow a policy with a higher number than the one after the look."""

    @property
    def done(self) -> list[Write]:
        """Writes that happened."""
        return [write for write in self.writes if write.call.is_done]

    @property
    def creations(self) -> set[str]:
        """UIDs of the groups whose creation was answered."""
        calls = [(write.call, write.after) for write in self.done if write.call.plural == "statefulsets" and not write.call.error]
        return {after[call.name].uid for call, after in calls if call.verb == "create" and call.name in after}

    def group(self, uid: str) -> ObservedGroup | None:
        """Returns a group as the plan's snapshot shows it."""
        groups = self.plan.snapshot.groups if self.plan else ()
        return next((group for group in groups if group.uid == uid), None)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A number of groups that an HPA has written."""

    at: float
    key: Key
    """Of the service."""
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A world after all faults have ended and its operator had time."""

    key: Key
    now: str
    spec_replicas: int
    autoscaling: Autoscaling | None
    load: float
    """Requests per second, as groups' worth of work."""
    revisions: frozenset[str]
    """Revisions that groups may have."""
    max_old: int
    """Groups that may have another revision: `partition`."""
    truth: Truth
    service: Json
    looks: int
    seconds: float
    is_quiet: bool
    """The last looks wrote nothing."""
    shared: frozenset[str]
    """Kinds and names of the objects that all groups share."""
    foreign: tuple[str, ...]
    """Applied fields that have another client's value, and other clients' fields that are lost."""
    orphans: tuple[str, ...]
    """Objects of services that no longer exist."""
    publishes_unready: bool
    """The Service of the routers keeps unready ones."""


def actions_of(look: Look, *kinds: type) -> list[Any]:
    """Returns the planned actions of these kinds."""
    return [action for action in look.plan.actions if isinstance(action, kinds)] if look.plan else []
