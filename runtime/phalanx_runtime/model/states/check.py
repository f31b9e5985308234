"""Checks at load that layers with states give the same outputs whether a prompt is computed whole, in chunks or by token."""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.states.mixers import Mixer, Mixers
from phalanx_runtime.model.states.step import StepRows, TokenGroup, divide_step
from phalanx_runtime.model.states.store import RowStates

log = logging.getLogger(__name__)

_STEPS = ((5, 3), (1, 1), (6, 1), (1, 7))
"""Tokens of two equal requests in each step; both compute the rest at the end."""


def check_states(mixers: Mixers, device: torch.device, peers: Collective) -> None:
    """Checks each layer with the arguments that it has recorded, and drops these; collective if there are any.

    All ranks compute later chunks of a layer token by token if one of them must. Logs these layers. Raises Unsupported.
    """
    if not mixers.mixers:
        return
    for mixer in mixers.mixers:
        if mixer.sample is None or not mixer.shapes:
            raise Unsupported(f"its layer {mixer.name} keeps a state, and sets none")
    by_rank = peers.all_gather_integers([int(_is_equal(mixer, device)) for mixer in mixers.mixers])
    for mixer, *takes_chunks in zip(mixers.mixers, *by_rank, strict=True):
        if not all(takes_chunks):
            mixer.takes_chunks = False
            if not _is_equal(mixer, device):
                raise Unsupported(f"its layer {mixer.name} gives other outputs if a prompt is computed in chunks")
        mixer.sample = None
    if by_token := [mixer.name for mixer in mixers.mixers if not mixer.takes_chunks]:
        log.warning("later chunks of prompts are computed token by token", extra={"layers": by_token})


def _is_equal(mixer: Mixer, device: torch.device) -> bool:
    """Returns whether two requests in chunks have the output of a whole one. Ranks may share a layer: all compute all chunks."""
    assert mixer.sample is not None, "checked by the caller"
    args, options, whole = mixer.sample
    size = next(leaf.shape[1] for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))
    states = RowStates(mixer.shapes, 2, device)
    expected = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
    starts, is_equal = [0, 0], True
    for counts in (*_STEPS, tuple(size - sum(column) for column in zip(*_STEPS, strict=True))):
        step = StepRows((0, 1), tuple(starts), counts)
        places = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]).to(device)
        part_args, part_options = tree_map(partial(_pick, places=places, size=size), (args, options))
        states.begin(step)
        try:
            output = mixer.compute(divide_step(step, mixer.takes_chunks), states, part_args, part_options)
        except Exception as error:
            raise Unsupported(f"its layer {mixer.name} fails in chunks: {type(error).__name__}: {error}") from error
        parts = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        is_equal &= all(_is_close(reference[:, places], part) for reference, part in zip(expected, parts, strict=True))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    return is_equal


def _pick(value: Any, places: Tensor, size: int) -> Any:
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, size):
        return TokenGroup((0,), places, len(places), is_first=False).take(value)
    return value


def _is_close(reference: Tensor, other: Tensor) -> bool:
    limit = 1e-3 if reference.dtype in (torch.float32, torch.float64) else 0.1
    difference = (reference.double() - other.double()).abs().max()
    return bool(difference <= limit * max(float(reference.double().std()), 1e-6))
