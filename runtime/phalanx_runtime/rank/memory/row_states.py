"""Memory for the states of layers that keep one per request, and what the engine cannot do with them."""

import logging
from dataclasses import dataclass

import msgspec
import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.model.states.mixers import mixers_of

log = logging.getLogger(__name__)

MIN_SNAPSHOTS = 8
"""Snapshots of states, if they are fewer than half the rows."""
MAX_HOST_SNAPSHOTS = 8
"""Snapshots in host memory for each row, at most; they take half of that memory at most."""
MAX_STATE_BYTES = (1 << 32) - 1
"""Of a row on one rank: the largest frame of a move."""
_MIN_PAGE_BYTES = 1 << 20
"""Smaller pages take about as long to copy."""
MAX_UNUSED_PAGES = 1 << 18
"""Pages of a model without attention: each takes memory for its record."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes of states."""

    row_bytes: int
    """Of one row, on all ranks; 0: no layer keeps a state."""
    num_bytes: int
    """Of all rows and snapshots on this rank."""
    num_snapshots: int
    num_host_snapshots: int = 0
    """Slots in host memory."""
    host_bytes: int = 0
    """Of these, on this rank."""

    def in_pool(self, pool: PoolShape, page_bytes: int) -> PoolShape:
        """Returns the shape of a pool with these states. There is no prefix cache if requests drop pages before a window.

        `page_bytes`: of a page on all ranks.
        """
        return msgspec.structs.replace(
            pool,
            has_states=self.row_bytes > 0,
            num_snapshots=0 if pool.window else self.num_snapshots,
            num_host_snapshots=0 if pool.window else self.num_host_snapshots,
            state_pages=-(-self.row_bytes // max(page_bytes, _MIN_PAGE_BYTES)),
        )

    def in_host(self, model: Model, window: int) -> tuple[int, int | None]:
        """Returns the bytes of host memory that snapshots take, and the most pages there: few if pages hold nothing, else all.

        `window`: of the pool, see `PoolShape`.
        """
        return 0 if window else self.host_bytes, MAX_UNUSED_PAGES if model.kv.is_unused else None

    def fit(self, model: Model, pool: PoolShape, num_rows: int, device: torch.device) -> int:
        """Frees the snapshots that the pool does not use, and allocates those in host memory.

        Returns the bytes of the states that this rank keeps on its device.
        """
        mixers = mixers_of(model)
        if self.num_snapshots and not pool.num_snapshots:
            log.warning("no prefix cache: layers with a window drop pages that a snapshot of a state needs")
            if mixers is not None:
                mixers.reserve(num_rows, device)
        elif self.row_bytes:
            log.info("snapshots of states", extra={"snapshots": pool.num_snapshots, "in_host_memory": pool.num_host_snapshots})
        if mixers is not None and mixers.states is not None and pool.num_host_snapshots:
            mixers.states.open_host(pool.num_host_snapshots)
        return 0 if mixers is None else mixers.row_bytes * (num_rows + pool.num_snapshots)


def reserve_states(
    model: Model,
    num_rows: int,
    device: torch.device,
    collective: Collective,
    *,
    num_snapshots: int = 0,
    host_bytes: int = 0,
) -> StateMemory:
    """Allocates the states of this rank's rows and snapshots; collective. Raises ModelError if no move could send them.

    host_bytes: of host memory for pages and snapshots, of which `StateMemory.fit` allocates the latter.
    """
    mixers = mixers_of(model)
    own_bytes = 0 if mixers is None else mixers.row_bytes
    sizes = [size for (size,) in collective.all_gather_integers([own_bytes])]
    check_row_bytes(max(sizes))
    row_bytes, num_host = sum(sizes), 0
    if row_bytes and num_snapshots:
        num_host = min(MAX_HOST_SNAPSHOTS * num_rows, host_bytes // 2 // max(sizes))
    if mixers is not None:
        mixers.reserve(num_rows, device, num_snapshots)
    return StateMemory(
        row_bytes,
        own_bytes * (num_rows + num_snapshots),
        num_snapshots if row_bytes else 0,
        num_host_snapshots=num_host,
        host_bytes=own_bytes * num_host,
    )


def check_row_bytes(num_bytes: int) -> None:
    """Raises ModelError if the states of a request on one rank are too large for a frame of a move."""
    if num_bytes > MAX_STATE_BYTES:
        raise ModelError(f"the states of a request take {num_bytes} bytes on a rank, a move sends at most {MAX_STATE_BYTES}")


def open_states(model: Model, engine: EngineConfig, device: torch.device, collective: Collective) -> StateMemory:
    """Allocates the states of all requests and logs what such a model does without; collective.

    Raises ModelError for settings that states cannot follow.
    """
    num_snapshots = max(MIN_SNAPSHOTS, engine.max_num_seqs // 2) if engine.enable_prefix_caching else 0
    states = reserve_states(
        model,
        engine.max_num_seqs,
        device,
        collective,
        num_snapshots=num_snapshots,
        host_bytes=engine.host_cache_memory or 0,
    )
    if states.row_bytes:
        _check(engine, states)
        mixers = mixers_of(model)
        dropped = [] if mixers is None else [mixer.name for mixer in mixers.mixers if mixer.dropped_limit]
        log.warning(
            "the model keeps a state per request",
            extra={
                "bytes_per_request": states.row_bytes,
                "requests": engine.max_num_seqs,
                "layers_without_time_step_limit": len(dropped),
            },
        )
    return states


def _check(engine: EngineConfig, states: StateMemory) -> None:
    if engine.speculative_method != "none" and engine.speculative_tree:
        raise ModelError("speculative_tree: layers with a state per request compute chains of draft tokens only; unset it")
    if engine.host_cache_adaptive:
        raise ModelError("host_cache_adaptive: the size of host memory with states is fixed; unset it")
    if engine.host_cache_memory is not None and not engine.enable_prefix_caching:
        raise ModelError("host_cache_memory: without a prefix cache there are no states of pages; unset it")
    if engine.host_cache_memory is not None and engine.disk_cache_path is not None and states.num_host_snapshots < 2:
        raise ModelError(
            f"disk_cache_path: half of host_cache_memory, {engine.host_cache_memory // 2} bytes, holds fewer than two states of a"
            " request; raise it"
        )


def useful_pages(model: Model, engine: EngineConfig, max_position: int, num_pages: int) -> int:
    """Returns how many pages, of `num_pages`, are of use: without attention layers they are small and hold nothing.

    Enough to count the tokens of all requests, and of as many cached prompts.
    """
    if not model.kv.is_unused:
        return num_pages
    longest = -(-(engine.max_model_len or max_position) // engine.page_size)
    return min(num_pages, MAX_UNUSED_PAGES, 2 * engine.max_num_seqs * longest)
