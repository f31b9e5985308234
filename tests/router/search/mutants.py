"""Planted faults of router, leader and operator. Each has a fleet that reaches it, and an invariant must report it.

`hunt` runs that fleet with the fault (`tests.planted`), or a search of other fleets, which need not reach it.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.planted import Replacement, run_planted


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault. `finds`: the beginning of a violation that reports it; `seed`, `faults`: a fleet that reaches it."""

    name: str
    module: str
    old: str
    new: str
    finds: str
    seed: int
    faults: str = ""


MUTANTS = (
    Mutant(
        "a leader keeps no orphans",
        "phalanx_runtime/server/link/orphans.py",
        "records = {handle: self._records.pop(handle, None) for handle in handles}",
        "records = dict.fromkeys(handles)",
        "resumable_streams_survive",
        1230,
        "14 kill:router 0 0 1",
    ),
    Mutant(
        "a stream continues after its client has left",
        "phalanx_router/session.py",
        "            self.assignment.link.abort(self.assignment.handle)\n",
        "",
        "groups_hold_nothing",
        1230,
    ),
    Mutant(
        "a group does not know which streams share a request",
        "phalanx_router/session.py",
        "assignment.link.share(assignment.handle, journal.as_shared())\n",
        "pass\n",
        "resumable_streams_survive",
        29_000_040,
        "16.83 kill:router 8 6 38.84",
    ),
    Mutant(
        "a copy of a journal repeats tokens",
        "phalanx_router/resume/backlog.py",
        "self._tokens.append((sent.number, delivered[sent.num_tokens :]))",
        "self._tokens.append((sent.number, delivered[max(0, sent.num_tokens - 1) :]))",
        "changed",
        847,
        "24 kill:router 0 0 1; 24.01 kill:leader 0 0 1; 24.02 kill:leader 0 0 1",
    ),
    Mutant(
        "the longest run of a stream is resumed",
        "phalanx_router/resume/registry.py",
        "return copy.request.epoch, copy.finish is not None, len(copy.request.delivered)",
        "return 0, copy.finish is not None, len(copy.request.delivered)",
        "clients_read_one_run",
        100_001_605,
        "100.46 cut:router-leader 0 0 4.9; 105.46 kill:router 0 0 1",
    ),
    Mutant(
        "requests under which groups died are moved",
        "phalanx_router/migration/mover.py",
        "if session.stream.journal.is_alone:  # the target",
        "if False:  # the target",
        "isolated",
        100_000_175,
        "36.47 kill:leader 1 0 1; 41.97 kill:leader 0 0 1; 44.47 move:leader 0 0 1; 44.67 move:leader 1 0 1",
    ),
    Mutant(
        "journals of ended streams are kept",
        "phalanx_router/resume/backlog.py",
        "self._closed.append(JournalEnd(sent.number, finish, is_forgotten))",
        "pass",
        "routers_hold_nothing",
        847,
    ),
    Mutant(
        "the connection of a lost router is kept",
        "phalanx_router/program.py",
        "PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 10.0",
        "PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 100_000.0",
        "routers_hold_nothing",
        847,
        "30 lose:router 0 0 1",
    ),
    Mutant(
        "the source of a move keeps its request",
        "phalanx_runtime/core/migration/source.py",
        "return [StopCopy(move, why), ReleaseMoved(move, outgoing.order.handle, why)]",
        "return [StopCopy(move, why)]",
        "groups_hold_nothing",
        1996,
        "21 move:leader 3 0 1; 36 move:leader 0 0 1",
    ),
    Mutant(
        "streams do not learn that their link is lost",
        "phalanx_router/links/leader_link.py",
        'self._drop_streams(f"group {self.endpoint.group}: {why}", is_drain, "outside" if is_outside else "")',
        "pass",
        "nothing_hangs",
        1230,
        "14 lose:leader 0 0 1",
    ),
    Mutant(
        "an equal request gets no tokens from before",
        "phalanx_router/streams/stream.py",
        "self.journal.extend(source.journal.delivered[len(self.journal.delivered) :])",
        "self.journal.extend(source.journal.delivered[len(self.journal.delivered) + 1 :])",
        "changed",
        1426,
    ),
    Mutant(
        "a resume repeats a token",
        "phalanx_frontend/stream/resume.py",
        "_continued(request, found.get(request.id), index + 1)",
        "_continued(request, found.get(request.id), index)",
        "index",
        1230,
        "14 kill:router 0 0 1",
    ),
    Mutant(
        "journals of closed streams do not expire",
        "phalanx_router/resume/journal_store.py",
        "keep_s: float = 60.0",
        "keep_s: float = 6000.0",
        "routers_hold_nothing",
        847,
    ),
    Mutant(
        "pages count as read that a rank lacks",
        "phalanx_runtime/core/kv/disk_tier.py",
        "num_read, num_parts = (min(counts.values(), default=0)",
        "num_read, num_parts = (max(counts.values(), default=0)",
        "changed",
        2054,
        "10 lost pages:leader 0 0 280; 11 slow disk:leader 0 2 60",
    ),
    Mutant(
        "a silent group with awaited weights counts as empty",
        "phalanx_router/summary.py",
        "return evacuate - self._streams().keys() - {session.failures.lost_group for session in waiting}",
        "return evacuate - self._streams().keys()",
        "no_stream_is_cut",
        10_884,
        "84.2 drain:leader 0 0 1; 90.7 slow:router-leader 0 0 4; 91.88 drop:router-leader 0 0 0.1",
    ),
    Mutant(
        "the operator awaits no drained group",
        "phalanx_operator/decide/groups/rollout.py",
        'if group.assessment.drained_reason else ""',
        'if True else ""',
        "no_group_leaves_without_cause",
        30_000,
        "20 drain:leader 0 0 1; 60 drain:leader 0 0 1; 100 drain:leader 0 0 1",
    ),
    Mutant(
        "a lost link is not opened again",
        "phalanx_router/links/leader_link.py",
        "await asyncio.sleep(wait_s * (0.5 + self._draw() / 2))",
        "await asyncio.sleep(wait_s * (0.5 + self._draw() / 2) if num_failures else 1e9)",
        "all_return",
        1230,
        "14 drop:router-leader 0 0 1",
    ),
    Mutant(
        "routers' reports of groups on silent nodes are ignored",
        "phalanx_operator/decide/groups/lost_nodes.py",
        "and age <= EVIDENCE_S\n",
        "and age <= -1\n",
        "routers_evidence_keeps_groups",
        40_002,
        "30 silence:node 0 0 240",
    ),
    Mutant(
        "a partition never ends",
        "phalanx_operator/decide/conditions/holds.py",
        "conditions = drop_condition(status.conditions, kind)",
        "conditions = status.conditions",
        "status_is_whole",
        40_002,
        "30 silence:nodes 0 4 200",
    ),
    Mutant(
        "polls end without the API server",
        "phalanx_operator/routers.py",
        """            service.token_read_s = now_s
            with contextlib.suppress(KubeError, TimeoutError):  # polls continue without the API server
                async with asyncio.timeout(timing.token_read_s):
                    service.token = await self._read_token(key) or service.token
""",
        "            service.token, service.token_read_s = await self._read_token(key), now_s\n",
        "polls_continue",
        40_002,
        "30 cut:api-operator 0 0 240",
    ),
    Mutant(
        "own drains are forgotten",
        "phalanx_operator/apply/executor.py",
        "self._children.pending_writes(execution.key).drain_marks[action.uid] = Annotation(mark, read_version(written))",
        "pass",
        "never_below_availability",
        40_017,
        "30 late watch:operator 1 0 150; 40 drain:leader 0 0 1; 60 drain:leader 0 0 1; 90 drain:leader 0 0 1",
    ),
)
"""Each with a fleet that reaches its fault."""


def num_places(mutant: Mutant) -> int:
    """Returns how often the module has the text."""
    return _replacement(mutant).num_places


def hunt(mutant: Mutant, folder: Path, *arguments: str) -> str:
    """Returns the output of the search, or of the mutant's fleet without arguments; empty if it finds nothing.

    Raises RuntimeError if the mutant does not start.
    """
    fleet = ("--seed", str(mutant.seed), "--faults", mutant.faults)
    return run_planted(_replacement(mutant), folder, "tests.router.search", *(arguments or fleet))


def _replacement(mutant: Mutant) -> Replacement:
    home = "operator" if mutant.module.startswith("phalanx_operator") else "runtime"
    return Replacement(home, mutant.module, mutant.old, mutant.new)
