"""Planted faults of the operator. Each has a script that reaches it, and an invariant must report it.

`hunt` runs that script with the fault (`tests.planted`), or a search of random worlds, which need not reach it.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.planted import Replacement, run_planted


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault. `finds`: names of the invariants that report it; `script`: steps that reach it."""

    name: str
    module: str
    old: str
    new: str
    finds: tuple[str, ...]
    script: str


def _mutant(name: str, module: str, old: str, new: str, finds: str, script: str) -> Mutant:
    return Mutant(name, module, old, new, tuple(finds.split()), script)


TWO, THREE, SURGE = "start 2 0 1 20 0; wait 4; wait 4", "start 3 0 1 20 0; wait 4; wait 4", "start 2 1 1 20 0; wait 4; wait 4"
PAIRS = "start 3 0 2 20 0; wait 4; wait 4"
SCALED_IN = "start 3 0 1 20 0; wait 4; wait 4; pin 1; streams 3; autoscale 1; wait 4; wait 1; cut_many 3; wait 5"
"""The operator drains one of three groups; then the others' nodes are silent."""
RESTARTED = "delete_pod 6; wait 1; wait 1; wait 2"
"""The router of `PAIRS` restarts."""
WOKEN = "start 1 0 1 20 4; wait 4; wait 4; autoscale 3; wait 7; load_one 0 1; wait 1"
"""Requests at one of two routers wake the service."""
CORDONS = "cordon 0 1; wait 1; cordon 0 0; cordon 1 1; wait 1; cordon 1 0; cordon 2 1; wait 1"
ROLLOUT, LOST, DRAIN = "decide/groups/rollout.py", "decide/groups/lost_nodes.py", "decide/groups/drain.py"
SCALE, AUTOSCALER = "decide/scaling/scale.py", "decide/scaling/autoscaler.py"
RECOVERY, STATUS = "decide/groups/recovery.py", "decide/conditions/status.py"
AVAILABILITY = "decide/conditions/availability.py"
MUTANTS = (
    _mutant(
        "surge is one too large",
        ROLLOUT,
        "target = desired.replicas + surge",
        "target = desired.replicas + surge + 1",
        "never_above_surge",
        TWO,
    ),
    _mutant(
        "unavailable groups are ignored",
        ROLLOUT,
        "sum(group.available for group in staying) - min_available",
        "len(staying) - min_available",
        "never_below_availability",
        f"{THREE}; fail 0 1; wait 3; rollout 1; wait 2; wait 3",
    ),
    _mutant(
        "all old groups leave at once",
        ROLLOUT,
        "return removals[: disruption_budget(staying, desired.replicas - max_unavailable)]",
        "return removals",
        "never_below_availability",
        f"{THREE}; rollout 1; wait 3",
    ),
    _mutant(
        "a scale-in leaves no available group",
        ROLLOUT,
        "return [group for group in victims if group not in needed]",
        "return victims",
        "never_below_availability",
        "start 3 5 1 20 0; wait 5; wait 6; skew 0 4; rollout 1; wait 7; scale 1; wait 1",
    ),
    _mutant(
        "surplus groups are deleted without drain",
        ROLLOUT,
        "if not g.is_spared)\n    delete += tuple(DeleteGroup(g.name, g.uid, why) for g in live",
        ")\n    delete += tuple(DeleteGroup(g.name, g.uid, why) for g in live",
        "no_group_leaves_without_cause",
        f"{TWO}; scale 1; wait 3",
    ),
    _mutant(
        "drained groups are not awaited",
        ROLLOUT,
        'if group.assessment.drained_reason else ""',
        'if True else ""',
        "no_group_leaves_without_cause no_stream_is_cut",
        f"{TWO}; pin 1; streams 1; scale 1; wait 3",
    ),
    _mutant(
        "one group is never created",
        ROLLOUT,
        "max(target - left, 0))",
        "max(target - left - 1, 0))",
        "converges status_converges",
        TWO,
    ),
    _mutant(
        "a paused rollout continues",
        ROLLOUT,
        "old = [] if desired.paused else [group for group in outdated_groups(staying, desired) if group.alive]",
        "old = [group for group in outdated_groups(staying, desired) if group.alive]",
        "paused_rollouts_replace_nothing",
        f"{THREE}; pause 1; rollout 1; wait 3",
    ),
    _mutant(
        "partition is ignored",
        "decide/state/groups.py",
        "return old[: max(len(old) - desired.partition, 0)]",
        "return old[:0]",
        "converges status_converges",
        f"{THREE}; rollout 1; wait 3",
    ),
    _mutant(
        "creations are forgotten",
        "apply/executor.py",
        "pending.created[uid] = Creation(",
        "_ = (",
        "never_above_surge",
        f"{TWO}; late_watch 0 1; scale 3; wait 1; rollout 1; wait 1",
    ),
    _mutant(
        "creations have no reason",
        ROLLOUT,
        'CreateGroup(name, f"{left} groups of {target}, revision {desired.revision}")',
        'CreateGroup(name, "")',
        "every_action_has_a_reason",
        TWO,
    ),
    _mutant(
        "a partition is not noticed",
        LOST,
        'return next(filter(None, found), "")',
        'return ""',
        "nothing_is_deleted_in_a_partition",
        f"{PAIRS}; router_mode 0 1; cut_many 63; wait 3; wait 6; wait 4",
    ),
    _mutant(
        "a partition keeps no group on ready nodes",
        ROLLOUT,
        "_commanded(delete, live, desired) if desired.kept_reason else delete",
        "delete",
        "nothing_is_deleted_in_a_partition",
        SCALED_IN,
    ),
    _mutant(
        "a partition leaves no surge",
        "decide/plan.py",
        "return replicas + service.spec.rollout.surge(replicas) if replicas else 0",
        "return replicas",
        "nothing_is_deleted_in_a_partition",
        "start 3 1 1 20 0; wait 4; wait 4; pin 1; streams 1; scale 2; wait 2; cut_many 3; wait 3; end_streams; wait 3; wait 3",
    ),
    _mutant(
        "a count of the operator is a user's order",
        AUTOSCALER,
        "return writer.manager != labels.MANAGER",
        "return True",
        "nothing_is_deleted_in_a_partition",
        SCALED_IN,
    ),
    _mutant(
        "a partition lowers the count",
        AUTOSCALER,
        'held = snapshot.kept_reason or (snapshot.clock_reason if decision.verdict == "Bounds" else "")',
        'held = snapshot.clock_reason if decision.verdict == "Bounds" else ""',
        "nothing_is_deleted_in_a_partition",
        "start 3 0 2 20 4; wait 4; wait 4; autoscale 1; cut_many 63; wait 6",
    ),
    _mutant(
        "a node that returns has reported its pods",
        LOST,
        "return abs(age) < (LONGEST_S if pod.is_unreported else RETURN_S)",
        "return False",
        "restarts_are_due",
        f"{TWO}; router_mode 0 1; cut_many 63; wait 5; wait 4; wait 3; return_all; wait 1",
    ),
    _mutant(
        "late kubelets have reported",
        LOST,
        "return abs(age) < (LONGEST_S if pod.is_unreported else RETURN_S)",
        "return abs(age) < RETURN_S",
        "restarts_are_due",
        f"{TWO}; late_kubelets 1; router_mode 0 1; cut_many 63; wait 5; wait 4; wait 3; return_all; wait 4",
    ),
    _mutant(
        "answers of routers that have just started count",
        LOST,
        "if pod.ready and _is_younger(pod.ready_since, FIRST_REPORTS_S, states.now)}",
        "if False}",
        "young_routers_end_no_group",
        f"{PAIRS}; cut 2; wait 5; wait 3; {RESTARTED}",
    ),
    _mutant(
        "routers on nodes that return are not asked",
        "loop/reconcile.py",
        "is_silent = pod.is_unreported or is_on_silent_node(pod, snapshot.nodes, now)",
        "is_silent = pod.node in snapshot.nodes and not snapshot.nodes[pod.node].ready",
        "routers_that_may_run_are_asked",
        f"{TWO}; cut_many 63; wait 4; return_all; wait 1",
    ),
    _mutant(
        "routers that shut down are not polled",
        "loop/reconcile.py",
        "if pod.ip and (pod.ready or pod.terminating or is_silent):",
        "if pod.ip and (pod.ready or is_silent):",
        "requests_keep_a_group",
        f"{WOKEN}; wait 7; delete_router 0; load 0; wait 2",
    ),
    _mutant(
        "a woken service is idle at once",
        SCALE,
        "if history.scaled_out_s is not None and inputs.now_s - history.scaled_out_s < idle_s:",
        "if False:",
        "requests_keep_a_group",
        f"{WOKEN}; delete_router 0; load 0; wait 6",
    ),
    _mutant(
        "a group starts with its oldest pod",
        "decide/groups/progress.py",
        "return min([_longest_unready_s(group, now), *lives])",
        "return _longest_unready_s(group, now)",
        "restarts_are_due",
        "start 1 0 2 20 8; wait 4; wait 4; slow_exit 1; delete_pod 1; wait 7",
    ),
    _mutant(
        "policies are numbered by the time alone",
        "decide/state/policy.py",
        "max(number + 1, int(now_s), reported + 1)",
        "max(number + 1, int(now_s))",
        "routers_take_the_newest_policy",
        f"{TWO}; skew 0 4; restart; wait 3",
    ),
    _mutant(
        "routers' reports are ignored",
        LOST,
        'lost_reason="" if alive_reason or kept_reason else _lost_reason',
        "lost_reason=_lost_reason",
        "routers_evidence_keeps_groups",
        f"{PAIRS}; cut 0; wait 3; wait 6",
    ),
    _mutant(
        "a silent node is lost at once",
        LOST,
        "if age is not None and age >= limit_s else",
        "if age is not None else",
        "no_group_leaves_without_cause pods_are_forced_on_lost_nodes_only",
        f"{PAIRS}; kill_node 0; wait 4; wait 4",
    ),
    _mutant(
        "pods are forced off ready nodes",
        LOST,
        "if pod.uid and (why := loss_reason(states.nodes.get(pod.node), states.limit_s, states.now))",
        'if pod.uid and (why := "its group ends")',
        "pods_are_forced_on_lost_nodes_only",
        f"{TWO}; scale 1; wait 3",
    ),
    _mutant(
        "pods that never end are awaited",
        LOST,
        "_lost_reason(group, states) or _stuck_reason(group, states)",
        "_lost_reason(group, states)",
        "groups_of_stuck_pods_are_replaced",
        f"{TWO}; {'; '.join(f'hang {node} 1' for node in range(6))}; delete_pod 0; delete_pod 1; delete_pod 2; wait 7; wait 7",
    ),
    _mutant(
        "pods that kubelets refuse do not count",
        RECOVERY,
        "refused = [refusal.at for refusal in group.refusals if refusal.at not in record.at]",
        "refused = list[str]()",
        "refused_groups_are_given_up",
        f"start 1 0 1 20 0; {'; '.join(f'refuse {node} 1' for node in range(6))}; wait 6; wait 6",
    ),
    _mutant(
        "startup has no time",
        RECOVERY,
        "return age is not None and age >= policy.startup_seconds\n",
        "return age is not None\n",
        "restarts_are_due",
        TWO,
    ),
    _mutant(
        "restarts delete later pods too",
        RECOVERY,
        "if pod.uid in group.restarts.pods and not pod.terminating",
        "if group.restarts.pods and not pod.terminating",
        "restarts_are_due",
        f"{TWO}; fail 0 1; wait 6; wait 5; wait 5",
    ),
    _mutant(
        "no restart is allowed",
        RECOVERY,
        "count.recent <= policy.max_group_restarts\n",
        "count.recent < 0\n",
        "no_group_leaves_without_cause",
        TWO,
    ),
    _mutant(
        "streams are not awaited",
        DRAIN,
        "if fleet.is_complete and group.name in fleet.evacuated and not is_busy:",
        "if fleet.is_complete:",
        "no_group_leaves_without_cause no_stream_is_cut",
        f"{TWO}; pin 1; streams 1; scale 1; wait 2; wait 2",
    ),
    _mutant(
        "one router's report is enough",
        DRAIN,
        "if fleet.is_complete and group.name in fleet.evacuated",
        "if group.name in fleet.evacuated",
        "no_group_leaves_without_cause",
        "start 2 0 1 20 4; wait 4; wait 4; pin 1; streams 1; router_mode 0 1; wait 4; scale 1; end_streams; wait 2; wait 2",
    ),
    _mutant(
        "drains have no timeout",
        DRAIN,
        "if age is None or age >= timeout_s:\n        return f",
        "if False:\n        return f",
        "converges",
        "start 1 0 1 20 0; wait 4; wait 4; streams 1; rollout 1; wait 2",
    ),
    _mutant(
        "drains end early",
        DRAIN,
        "if age is None or age >= timeout_s:\n        return f",
        "if age is None or age >= 0:\n        return f",
        "no_group_leaves_without_cause no_stream_is_cut",
        f"{TWO}; pin 1; streams 1; scale 1; wait 2; wait 2",
    ),
    _mutant(
        "missing groups count as ready",
        STATUS,
        "if unready or len(staying) != desired.replicas:",
        "if False:",
        "conditions_agree",
        f"{TWO}; delete_group 0; wait 1",
    ),
    _mutant(
        "Stalled never ends",
        STATUS,
        'return drop_condition(conditions, "Stalled")',
        "return conditions",
        "conditions_agree",
        f"{TWO}; fail 0 3; wait 7; wait 7",
    ),
    _mutant(
        "a partition never ends",
        "decide/conditions/holds.py",
        "conditions = drop_condition(status.conditions, kind)",
        "conditions = status.conditions",
        "conditions_agree",
        f"{PAIRS}; cut_many 63; wait 3; return_all; wait 5; wait 5",
    ),
    _mutant(
        "only the control plane's view is available",
        AVAILABILITY,
        "if has_answer and any(is_reported(group, fleet) for group in alive):",
        "if False:",
        "availability_follows_evidence",
        f"{PAIRS}; cut_many 63; wait 4",
    ),
    _mutant(
        "any report counts as available",
        AVAILABILITY,
        "if has_answer and any(is_reported(group, fleet) for group in alive):",
        "if any(group.name in fleet.groups for group in live_groups(snapshot.groups)):",
        "availability_follows_evidence",
        f"{PAIRS}; cut_many 63; wait 4; wait 3; kill_node 0; kill_node 1; kill_node 2; kill_node 3; wait 2; wait 3",
    ),
    _mutant(
        "a router that shuts down counts as available",
        AVAILABILITY,
        "if has_answer and any(is_reported(group, fleet) for group in alive):",
        "if any(is_reported(group, fleet) for group in alive):",
        "availability_follows_evidence",
        "start 1 0 1 20 8; wait 4; wait 4; streams 3; delete_router 0; delete_router 1; wait 1; wait 1",
    ),
    _mutant(
        "own drains are forgotten",
        "apply/executor.py",
        "self._children.pending_writes(execution.key).drain_marks[action.uid] = Annotation(mark, read_version(written))",
        "pass",
        "never_below_availability",
        f"{THREE}; late_watch 0 1; rollout 1; wait 0; {CORDONS}",
    ),
    _mutant(
        "scale-out ignores the maximum",
        SCALE,
        "return max(inputs.groups, min(groups, limit, rules.max_groups))",
        "return max(inputs.groups, min(groups, limit))",
        "scaling_stays_in_bounds",
        f"{TWO}; autoscale 1; load 5; wait 6; wait 5",
    ),
    _mutant(
        "metrics that vanish lower the count",
        SCALE,
        "if not fleet.is_complete:",
        "if False:",
        "no_scale_down_without_metrics",
        "start 3 0 1 20 4; wait 4; wait 4; autoscale 1; load 1; wait 2; router_mode 0 1; wait 6; wait 6",
    ),
    _mutant(
        "scale-in ignores the load",
        SCALE,
        "    step = rules.down_max_step",
        "    if n > 1:\n        return history, replace(steady, groups=n - 1)\n    step = rules.down_max_step",
        "no_flip_flop",
        f"{TWO}; autoscale 1; load 4; wait 5",
    ),
    _mutant(
        "nothing scales out",
        SCALE,
        "return max(inputs.groups, min(groups, limit, rules.max_groups))",
        "return inputs.groups",
        "scaling_carries_the_load",
        f"{TWO}; autoscale 1; load 5; wait 5",
    ),
    _mutant(
        "the schedule that fired first applies",
        AUTOSCALER,
        "index = max(firings)[1]",
        "index = min(firings)[1]",
        "scaling_stays_in_bounds",
        "start 2 0 1 20 0; wait 4; autoscale 4; wait 5",
    ),
    _mutant(
        "schedules follow a clock that has just changed",
        AUTOSCALER,
        '(snapshot.clock_reason if decision.verdict == "Bounds" else "")',
        '""',
        "clock_changes_scale_nothing_in",
        "start 3 0 1 20 0; wait 6; autoscale 4; wait 4; skew 0 3; wait 3",
    ),
    _mutant(
        "the operator writes the count beside an HPA",
        AUTOSCALER,
        'writes = policy.mode == "Internal" and not conflict',
        "writes = not conflict",
        "only_internal_scaling_writes",
        f"{TWO}; autoscale 5; load 5; wait 4",
    ),
    _mutant(
        "pods of other services count as own",
        "kube/store.py",
        "return list(self._by_service.get(key, {}).values())",
        "return [record for own, records in self._by_service.items() if own[0] == key[0] for record in records.values()]",
        "only_own_objects_change",
        "start 1 0 1 20 0; wait 4; neighbour 1; wait 4; wait 4; kill_node 0; kill_node 1; wait 6; wait 6",
    ),
    _mutant(
        "only the service's own nodes count in a partition",
        "decide/groups/partition.py",
        '("the cluster", census.silent, census.total, min(MIN_SILENT, census.total)),',
        "",
        "nothing_is_deleted_in_a_partition",
        "start 3 0 1 20 0; wait 4; neighbour 2; wait 4; wait 4; router_mode 0 1; cut_many 49; wait 3; wait 6",
    ),
    _mutant(
        "objects are applied once",
        "apply/owned.py",
        "return former.digest != digest or self._clock() - former.at_s > REAPPLY_S",
        "return former.digest != digest",
        "applied_fields_hold",
        f"{TWO}; meddle 0 1; wait 3",
    ),
    _mutant(
        "the Service of groups is not kept",
        "apply/shared_objects.py",
        "else:\n                await self._owned.keep(service, body, is_missing=is_missing)",
        'elif body["kind"] != "Service":\n                await self._owned.keep(service, body, is_missing=is_missing)',
        "nothing_is_left_over",
        TWO,
    ),
    _mutant(
        "unready routers stay in their Service",
        "apply/shared_objects.py",
        "return now_s < self._published_until_s.get(key, now_s)",
        "return key in self._published_until_s",
        "nothing_is_left_over",
        f"{TWO}; cut_many 63; wait 4",
    ),
)
"""Each with a script that reaches its fault."""


def num_places(mutant: Mutant) -> int:
    """Returns how often the module has the text."""
    return _replacement(mutant).num_places


def hunt(mutant: Mutant, folder: Path, *arguments: str) -> str:
    """Returns the output of the search, or of the mutant's script without arguments; empty if it finds nothing.

    Raises RuntimeError if the mutant does not start.
    """
    return run_planted(_replacement(mutant), folder, "tests.control.search", *(arguments or ("--script", mutant.script)))


def _replacement(mutant: Mutant) -> Replacement:
    return Replacement("operator", f"phalanx_operator/{mutant.module}", mutant.old, mutant.new)
