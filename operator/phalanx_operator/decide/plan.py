"""All that is to be done for one service now."""

from phalanx_api.inference_service import InferenceService
from phalanx_operator.decide.actions import Action, InitReplicas, KeepChildren, Plan
from phalanx_operator.decide.groups import Desired
from phalanx_operator.decide.rollout import next_step
from phalanx_operator.decide.snapshot import Snapshot
from phalanx_operator.decide.status import status

FIRST_REPLICAS = 1
"""Groups of a service whose manifest does not say."""


def desired_groups(service: InferenceService, revision: str, names: tuple[str, ...]) -> Desired:
    """The groups that the spec asks for."""
    return Desired(revision, wanted_replicas(service), service.spec.router.replicas, names)


def wanted_replicas(service: InferenceService) -> int:
    """How many groups should run: none while suspended."""
    if service.spec.suspend:
        return 0
    return FIRST_REPLICAS if service.spec.replicas is None else service.spec.replicas


def decide(service: InferenceService, snapshot: Snapshot, desired: Desired, now: str) -> Plan:
    """The plan for a service whose spec is valid. Calling it twice with the same arguments does no harm."""
    actions: list[Action] = []
    if not snapshot.has_replicas:
        actions.append(InitReplicas(FIRST_REPLICAS, "the manifest does not say how many groups"))
    actions.append(KeepChildren("every service has them"))
    if step := next_step(desired, snapshot.groups):
        actions += [*step.delete, *step.create]
    return Plan(tuple(actions), status(snapshot, desired, suspended=service.spec.suspend, now=now))
