"""Snapshots of states in the host memory of a rank, with a disk below them.

    record of a snapshot on disk: number of tokens in the state (8 bytes) | states of this rank's layers

A rank without states keeps records too: rank 0's are the keys that requests find.
"""

from dataclasses import replace
from struct import Struct

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import PoolShape, StepPlan
from phalanx_runtime.errors import RowStateLost
from phalanx_runtime.model.states.mixers import states_of
from phalanx_runtime.model.states.store import RowStates
from phalanx_runtime.rank.tiers.disk_pages import DiskPages
from phalanx_runtime.rank.tiers.host_pages import NoHostPages
from phalanx_runtime.rank.tiers.opening import PageBytes

_NUM_TOKENS = Struct("<Q")
_NO_ROW = -1
MIN_QUEUED_SNAPSHOTS = 2
"""A step replaces few of them, and each may be as large as hundreds of pages."""


class StateSlots(NoHostPages):
    """Implements `HostCopies` for snapshots, which plans copy with the other states: it has slots for those from disk."""

    def __init__(self, states: RowStates | None, disk: DiskPages) -> None:
        """states: None on a rank whose layers keep none."""
        self.disk = disk
        self._states = states

    def write(self, slot: int, page: memoryview) -> None:
        """See `HostCopies`. `page`: a record."""
        if self._states is not None:
            (num_tokens,) = _NUM_TOKENS.unpack_from(page)
            self._states.fill_snapshot(slot, num_tokens, page[_NUM_TOKENS.size :])


def record_bytes(sizes: PageBytes, model: object, pool: PoolShape) -> PageBytes:
    """Returns what the disk of this rank keeps: with states a record per snapshot, as many per page as in host memory."""
    if not pool.num_host_snapshots:
        return sizes
    states = states_of(model)
    row_bytes, layout = (0, "none") if states is None else (states.row_bytes, states.layout)
    return replace(
        sizes,
        part=_NUM_TOKENS.size + row_bytes,
        parts_per_page=pool.num_host_snapshots / pool.num_host_pages,
        part_kind=f"states {layout}",
        min_queued_parts=MIN_QUEUED_SNAPSHOTS,
    )


def prepare_states(model: object, plan: StepPlan, disk: DiskPages | None) -> None:
    """Executes what the plan does with snapshots. `disk`: gets those that it stores in host memory."""
    states = states_of(model)
    if states is not None:
        states.prepare(plan.state_loads, plan.state_saves, plan.state_stores)
    if disk is None:
        return
    latest = {host_slot: slot for slot, host_slot in plan.state_stores}
    for (slot, host_slot), (key, num_tokens) in zip(plan.state_stores, plan.state_keys, strict=bool(plan.state_keys)):
        source = host_slot if latest[host_slot] == slot else slot  # host memory: it needs no second copy from a GPU
        pieces = [] if states is None else states.read_snapshot(source, num_tokens)
        if pieces is not None:
            disk.put(key, [memoryview(_NUM_TOKENS.pack(num_tokens)), *pieces])


def agree_on_states(model: object, plan: StepPlan, peers: Collective) -> None:
    """Raises RowStateLost on all ranks of a stage if rows of one lack the state of the tokens before the plan; collective."""
    states = states_of(model)
    if states is None or peers.world_size == 1:
        return
    lost = states.lost(plan.rows, plan.starts)
    size = max(count for (count,) in peers.all_gather_integers([len(lost)]))
    if not size:
        return
    states.discard()
    by_rank = peers.all_gather_integers([*lost, *[_NO_ROW] * (size - len(lost))])
    rows = {row for found in by_rank for row in found if row != _NO_ROW}
    raise RowStateLost({row: lost.get(row, f"row {row} has lost its state on another rank") for row in sorted(rows)})
