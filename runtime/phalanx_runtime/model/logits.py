"""Logits of the whole vocabulary, from the parts of the ranks of a stage."""

from torch import Tensor

from phalanx_runtime.collective.protocol import Collective
from phalanx_runtime.model.partition import cut_evenly
from phalanx_runtime.model.protocol import Model


def gather_logits(model: Model, partial: Tensor, peers: Collective) -> Tensor | None:
    """Returns [n, vocabulary] on the first of `peers`. partial: this rank's logits, [n, rows]."""
    return peers.gather(partial, sizes=_sizes(model, peers))


def all_gather_logits(model: Model, partial: Tensor, peers: Collective) -> Tensor:
    """Returns [n, vocabulary], with equal bits on all ranks. partial: this rank's logits, [n, rows]."""
    return peers.all_gather(partial, sizes=_sizes(model, peers))


def _sizes(model: Model, peers: Collective) -> list[int]:
    return [part.size for part in cut_evenly(model.vocab_size, peers.world_size)]
