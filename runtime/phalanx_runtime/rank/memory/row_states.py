"""Memory for the states of layers that keep one per request, and what the engine cannot do with them."""

import logging
from dataclasses import dataclass

import torch

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.model.states.mixers import mixers_of

log = logging.getLogger(__name__)

MAX_UNUSED_PAGES = 1 << 18
"""Pages of a model without attention: each takes memory for its record."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Bytes of states."""

    row_bytes: int
    """Of one row, on all ranks; 0: no layer keeps a state."""
    num_bytes: int
    """Of all rows on this rank."""


def reserve_states(model: Model, num_rows: int, device: torch.device, collective: Collective) -> StateMemory:
    """Allocates the states of this rank's rows; collective."""
    mixers, row_bytes = mixers_of(model), 0
    if mixers is not None:
        mixers.reserve(num_rows, device)
        row_bytes = mixers.row_bytes
    return StateMemory(sum(size for (size,) in collective.all_gather_integers([row_bytes])), row_bytes * num_rows)


def open_states(model: Model, engine: EngineConfig, device: torch.device, collective: Collective) -> StateMemory:
    """Allocates the states of all requests and logs what such a model does without; collective.

    Raises ModelError for settings that states cannot follow.
    """
    states = reserve_states(model, engine.max_num_seqs, device, collective)
    if states.row_bytes:
        _check(engine)
        mixers = mixers_of(model)
        dropped = [] if mixers is None else [mixer.name for mixer in mixers.mixers if mixer.dropped_limit]
        log.warning(
            "the model keeps a state per request",
            extra={
                "bytes_per_request": states.row_bytes,
                "requests": engine.max_num_seqs,
                "without": "prefix caching, speculation",
                "layers_without_time_step_limit": len(dropped),
            },
        )
    return states


def _check(engine: EngineConfig) -> None:
    method = engine.speculative_method
    if method != "none":
        raise ModelError(
            f"speculative_method {method}: layers with a state per request cannot take back rejected draft tokens; set none"
        )
    if engine.host_cache_memory is not None:
        raise ModelError("host_cache_memory: pages without the state of their request cannot be used again; unset it")


def useful_pages(model: Model, engine: EngineConfig, max_position: int, num_pages: int) -> int:
    """Returns how many pages, of `num_pages`, are of use: without attention layers they are small and hold nothing."""
    if not model.kv.is_unused:
        return num_pages
    return min(num_pages, MAX_UNUSED_PAGES, engine.max_num_seqs * -(-(engine.max_model_len or max_position) // engine.page_size))
