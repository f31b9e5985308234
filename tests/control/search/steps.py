"""The steps of a script: what users, nodes, pods, routers, watches, calls and clocks do.

A script is one step per line, `name` and integers, which also choose among the present objects, so that it stays valid when the
operator changes.
"""

from collections.abc import Callable, Sequence

from phalanx_api import labels
from phalanx_operator.kube.client import DEPLOYMENTS, PODS, SERVICES, STATEFUL_SETS, Json
from phalanx_operator.kube.http import SILENCE_S
from tests.control.search.api_server import WATCHED, FaultKind, stamp
from tests.control.search.cluster import EXIT_S, LATE_REPORT_S, REPORT_S, SLOW_EXIT_S, Failure
from tests.control.search.ends import finish
from tests.control.search.history import Script
from tests.control.search.operators import Operator
from tests.control.search.simulated_routers import Mode
from tests.control.search.world import NEIGHBOUR, NOTE, VALID, SearchWorld
from tests.control.simulated_service import rate_for
from tests.control.worlds import KEY

NODES = 6
STRATEGIES = ((1, 0), (0, 1), (1, 1), (2, 0), ("50%", 0), (0, "50%"))
"""Pairs of `maxUnavailable` and `maxSurge`."""
INVALID = {"model": {"uri": "nowhere"}}
TIMES_S = (1, 5, 20, 45, 70, 130, 320, 700)
SKEWS_S = (0, 60, -60, 900, -900, 3600)
TARGETS = {"minReplicas": 1, "maxReplicas": 4, "targets": {"ttftP95Ms": 2000, "itlP95Ms": 100}}
SCHEDULES = (
    {"cron": "8 4 * * *", "timezone": "Europe/Berlin", "min": 3},
    {"cron": "15 3 * * *", "max": 1},
    {"cron": "15 3 * * *", "max": 2},
)
"""They fire 235 and 655 s after the start of a world; until then the last one of the day before applies."""
SCALING: tuple[Json | None, ...] = (
    None,
    TARGETS,
    TARGETS | {"onMetricsLoss": "Fallback", "fallbackReplicas": 3},
    TARGETS | {"minReplicas": 0, "scaleToZero": {"enabled": True, "idleSeconds": 300}},
    TARGETS | {"schedules": SCHEDULES},
    TARGETS | {"mode": "External"},
)
"""The choices of `autoscale`, in the order of kept scripts."""
WORK = 0.7
"""Groups' worth of work per unit of load."""


def begin(start: tuple[int, int, int, int, int]) -> SearchWorld:
    """Returns a world with a new service."""
    replicas, strategy, pods, start_s, flags = start
    unavailable, surge = STRATEGIES[strategy % len(STRATEGIES)]
    spec: Json = VALID | {
        "replicas": replicas,
        "parallelism": {"tensor": pods, "gpusPerPod": 1},
        "router": {"replicas": 2 if flags & 4 else 1},
        "rollout": {
            "maxUnavailable": unavailable,
            "maxSurge": surge,
            "progressDeadlineSeconds": 600,
            "onFailure": "Rollback" if flags & 1 else "Pause",
        },
        "drain": {"timeoutSeconds": 600 if flags & 8 else 60},
        "restartPolicy": {"startupSeconds": 180, "maxGroupRestarts": 2, "windowSeconds": 900},
    }
    if not flags & 2:
        spec["placement"] = {"gang": {"mode": "None"}}
    return SearchWorld(spec, NODES, float(start_s))


def run(script: Script) -> SearchWorld:
    """Runs a script, ends its faults and checks the end. Raises Violated."""
    world = begin(script.start)
    for name, arguments in script.steps:
        take(world, name, arguments)
    finish(world)
    return world


def take(world: SearchWorld, name: str, arguments: Sequence[int]) -> None:
    """Runs one step."""
    STEPS[name](world, *arguments)


# Users.


def scale(world: SearchWorld, replicas: int) -> None:
    world.change_spec(replicas=replicas)


def rollout(world: SearchWorld, version: int) -> None:
    world.change_spec(engine={"maxModelLen": 512 + version})


def restart_id(world: SearchWorld, number: int) -> None:
    world.change_spec(rollout={"restartId": f"r{number}"})


def pause(world: SearchWorld, is_paused: int) -> None:
    world.change_spec(rollout={"paused": bool(is_paused)})


def partition(world: SearchWorld, count: int) -> None:
    world.change_spec(rollout={"partition": count})


def strategy(world: SearchWorld, number: int) -> None:
    unavailable, surge = STRATEGIES[number % len(STRATEGIES)]
    world.change_spec(rollout={"maxUnavailable": unavailable, "maxSurge": surge})


def suspend(world: SearchWorld, is_suspended: int) -> None:
    world.change_spec(suspend=bool(is_suspended))


def invalid(world: SearchWorld, is_invalid: int) -> None:
    world.change_spec(KEY, **(INVALID if is_invalid else VALID))


def delete(world: SearchWorld, is_foreground: int) -> None:
    if world.service() is not None:
        world.api.terminate(("inferenceservices", *KEY), None if is_foreground else 1)


def recreate(world: SearchWorld, replicas: int) -> None:
    if world.service() is None:
        world.create_service(world.spec | {"replicas": replicas})


def autoscale(world: SearchWorld, mode: int) -> None:
    """Metrics that vanish hold the count, or raise it to three groups; the service scales to zero, by schedules, or by an HPA."""
    world.change_spec(autoscaling=None)
    world.change_spec(autoscaling=SCALING[mode % len(SCALING)])


def load(world: SearchWorld, units: int) -> None:
    """Clients send so much work that never stops."""
    world.fleet.favourite = None
    world.fleet.load[KEY[1]] = rate_for(units * WORK)


def load_one(world: SearchWorld, router: int, units: int) -> None:
    """Clients send it to one router, as long as that accepts it."""
    load(world, units)
    world.fleet.favourite = _pick(list(world.fleet.routers), router)


def neighbour(world: SearchWorld, replicas: int) -> None:
    """Another service is created, or scaled."""
    world.create_service(VALID | {"replicas": replicas, "placement": world.spec.get("placement", {})}, NEIGHBOUR)
    world.change_spec(NEIGHBOUR, replicas=replicas)


def meddle(world: SearchWorld, service: int, kind: int) -> None:
    """Another client sets a field that the operator applies, or one of its own."""
    key = list(world.keys)[service % len(world.keys)]
    objects = ((DEPLOYMENTS, f"{key[1]}-router"), (SERVICES, key[1]), (SERVICES, f"{key[1]}-groups"))
    resource, name = objects[kind % 3]
    if (body := world.api.objects.get((resource.plural, key[0], name))) is None:
        return
    if kind >= 3:
        annotations = (body["metadata"].get("annotations") or {}) | {NOTE: "keep"}
        world.api.edit(resource, key[0], name, metadata={"annotations": annotations})
        world.notes.add((resource.plural, name, body["metadata"]["uid"]))
    elif resource == DEPLOYMENTS:
        world.api.edit(resource, key[0], name, spec={"replicas": 3})
    else:
        world.api.edit(resource, key[0], name, spec={"selector": {"app": "another"}})


def ask_drain(world: SearchWorld, group: int, router: int) -> None:
    """A user of the console requests it."""
    if (name := _pick(_groups(world), group)) and (uid := _pick(list(world.fleet.routers), router)):
        world.fleet.routers[uid].requests[name] = world.t


def annotate(world: SearchWorld, group: int, text: int) -> None:
    """A user writes the drain annotation, with kubectl, or removes it."""
    name = _pick(_groups(world), group)
    if name:
        notes = (f"{stamp(world.t)} asked by hand", f"{stamp(world.t)} by hand", "yes", None)
        body = world.api.objects["statefulsets", KEY[0], name]["metadata"]
        annotations = (body.get("annotations") or {}) | {labels.DRAINING: notes[text % len(notes)]}
        kept = {key: value for key, value in annotations.items() if value is not None}
        world.api.edit(STATEFUL_SETS, KEY[0], name, metadata={"annotations": kept})


def delete_group(world: SearchWorld, group: int) -> None:
    if name := _pick(_groups(world), group):
        world.api.terminate(("statefulsets", KEY[0], name))


# Nodes and pods.


def cut(world: SearchWorld, node: int) -> None:
    world.cluster.set_node(_node(world, node), "cut")


def cut_many(world: SearchWorld, mask: int) -> None:
    for index, name in enumerate(list(world.cluster.machines)):
        if mask >> index & 1:
            world.cluster.set_node(name, "cut")


def kill_node(world: SearchWorld, node: int) -> None:
    world.cluster.set_node(_node(world, node), "dead")


def return_node(world: SearchWorld, node: int) -> None:
    world.cluster.set_node(_node(world, node), "up")


def return_all(world: SearchWorld) -> None:
    for name in world.cluster.machines:
        world.cluster.set_node(name, "up")


def delete_node(world: SearchWorld, node: int) -> None:
    world.cluster.delete_node(_node(world, node))
    world.cluster.add_node()


def cordon(world: SearchWorld, node: int, is_cordoned: int) -> None:
    world.cluster.cordon(_node(world, node), is_cordoned=bool(is_cordoned))


def hang(world: SearchWorld, node: int, is_stuck: int) -> None:
    """The container runtime of a node ends no pod, though its kubelet reports."""
    world.cluster.machines[_node(world, node)].is_stuck = bool(is_stuck)


def refuse(world: SearchWorld, node: int, is_refusing: int) -> None:
    """The kubelet of a node evicts the pods that start there."""
    world.cluster.machines[_node(world, node)].is_refusing = bool(is_refusing)


def fail(world: SearchWorld, group: int, kind: int) -> None:
    kinds: tuple[Failure, ...] = ("", "never", "crash", "image")
    if name := _pick(_groups(world), group):
        world.cluster.failing[name] = kinds[kind % 4]
        for pod in world.api.of_kind(PODS).values():
            if pod["metadata"]["labels"].get(labels.GROUP) == name and pod["metadata"]["uid"] in world.cluster.processes:
                world.cluster.processes[pod["metadata"]["uid"]].ready_at = (
                    world.t + 1.0 + (world.cluster.start_s if kind == 0 else 0)
                )


def delete_pod(world: SearchWorld, pod: int) -> None:
    """Someone evicts a pod of a group or a router."""
    if name := _pick(list(world.api.of_kind(PODS)), pod):
        world.api.terminate(("pods", KEY[0], name))


def die(world: SearchWorld, group: int) -> None:
    """The ranks of a group die; routers count it."""
    if name := _pick(sorted(world.serving()), group):
        world.fleet.deaths[name] = world.fleet.deaths.get(name, 0) + 1
        world.engines[name] = world.leader(name)


def delete_router(world: SearchWorld, router: int) -> None:
    """Someone evicts a router. It exits after its streams, and after the requests that it holds."""
    pods = [pod["metadata"] for pod in world.api.of_kind(PODS).values()]
    names = sorted(pod["name"] for pod in pods if pod["uid"] in world.fleet.routers)
    if name := _pick(names, router):
        world.api.terminate(("pods", KEY[0], name))


def slow_exit(world: SearchWorld, is_slow: int) -> None:
    """Pods of groups take minutes to exit: their streams do not move."""
    world.cluster.exit_s = SLOW_EXIT_S if is_slow else EXIT_S


def late_controller(world: SearchWorld, is_late: int) -> None:
    world.cluster.is_controller_late = bool(is_late)


def late_kubelets(world: SearchWorld, is_late: int) -> None:
    """Kubelets report pods later than usual after the return of their nodes."""
    world.cluster.report_s = LATE_REPORT_S if is_late else REPORT_S


# Routers.


def router_mode(world: SearchWorld, router: int, mode: int) -> None:
    modes: tuple[Mode, ...] = ("reports", "silent", "frozen")
    if uid := _pick(list(world.fleet.routers), router):
        world.fleet.routers[uid].mode = modes[mode % 3]


def unlink(world: SearchWorld, router: int, group: int) -> None:
    if (uid := _pick(list(world.fleet.routers), router)) and (name := _pick(_groups(world), group)):
        world.fleet.routers[uid].unlinked ^= {name}


def streams(world: SearchWorld, count: int) -> None:
    world.fleet.start_streams(count)


def end_streams(world: SearchWorld) -> None:
    for router in world.fleet.routers.values():
        router.streams.clear()


def pin(world: SearchWorld, is_pinned: int) -> None:
    world.fleet.is_pinned = bool(is_pinned)


# Operators, their calls and their watches.


def wait(world: SearchWorld, index: int) -> None:
    world.wait(TIMES_S[index % len(TIMES_S)])


def look(world: SearchWorld, operator: int) -> None:
    """An operator looks before its watches deliver anything."""
    world.look(_operator(world, operator))


def late_watch(world: SearchWorld, operator: int, kind: int) -> None:
    _operator(world, operator).watches[WATCHED[kind % len(WATCHED)].plural].late_until = world.t + SILENCE_S


def deliver(world: SearchWorld, operator: int, kind: int, count: int) -> None:
    world.deliver(_operator(world, operator), WATCHED[kind % len(WATCHED)], count)


def relist(world: SearchWorld, operator: int, kind: int, lag: int = 0) -> None:
    """A watch ends, and the list that follows shows objects from before the last `lag` events."""
    world.relist(_operator(world, operator), WATCHED[kind % len(WATCHED)], lag)


def fail_call(world: SearchWorld, operator: int, call: int, kind: int) -> None:
    kinds: tuple[FaultKind, ...] = ("before", "after", "rejected", "conflict")
    _operator(world, operator).faults.writes[call] = kinds[kind % 4]


def fail_read(world: SearchWorld, operator: int, read: int) -> None:
    _operator(world, operator).faults.reads_fail = read


def interrupt(world: SearchWorld, call: int, kind: int, number: int) -> None:
    """Just before a write of the first operator, others act."""
    acts: tuple[Callable[[], None], ...] = (
        lambda: scale(world, number % 5),
        lambda: rollout(world, number),
        lambda: delete_pod(world, number),
        lambda: delete_group(world, number),
        lambda: world.look(world.operators[-1]) if len(world.operators) > 1 else None,
        lambda: delete(world, number % 2),
    )
    _operator(world, 0).faults.interrupts[call] = world.interrupt(acts[kind % len(acts)])


def second_leader(world: SearchWorld) -> None:
    """Another operator leads too, for as long as the first does not notice."""
    if len(world.operators) < 2:
        world.start_operator()


def one_leader(world: SearchWorld) -> None:
    """The older operator ends."""
    if len(world.operators) > 1:
        world.operators.pop(0)


def restart(world: SearchWorld) -> None:
    """The operator is replaced by one without caches, whose clock may differ."""
    skew = world.operators[0].skew
    world.operators.clear()
    world.start_operator().skew = skew


def skew(world: SearchWorld, operator: int, index: int) -> None:
    """The clock changes, which the operator notices from 10 s on."""
    changed, to = _operator(world, operator), float(SKEWS_S[index % len(SKEWS_S)])
    changed.stepped_at = world.t if to != changed.skew else changed.stepped_at
    changed.skew = to


STEPS: dict[str, Callable[..., None]] = {
    step.__name__: step
    for step in (
        *(scale, rollout, restart_id, pause, partition, strategy, suspend, invalid, delete, recreate, ask_drain, annotate),
        *(autoscale, load, load_one, neighbour, meddle, delete_router, slow_exit),
        *(delete_group, cut, cut_many, kill_node, return_node, return_all, delete_node, cordon, hang, refuse),
        *(fail, delete_pod, die),
        *(
            late_kubelets,
            late_controller,
            router_mode,
            unlink,
            streams,
            end_streams,
            pin,
            wait,
            look,
            late_watch,
            deliver,
            relist,
            fail_call,
        ),
        *(fail_read, interrupt, second_leader, one_leader, restart, skew),
    )
}


def _groups(world: SearchWorld) -> list[str]:
    return sorted(world.api.of_kind(STATEFUL_SETS))


def _pick(names: Sequence[str], index: int) -> str:
    return names[index % len(names)] if names else ""


def _node(world: SearchWorld, index: int) -> str:
    return list(world.cluster.machines)[index % len(world.cluster.machines)]


def _operator(world: SearchWorld, index: int) -> Operator:
    return world.operators[index % len(world.operators)]
