"""The attention backend of each device type. A new backend is one module and one line in `BACKENDS`."""

import logging
from collections.abc import Callable, Mapping

import torch

from phalanx_runtime.model.attention.cpu import open_cpu_attention
from phalanx_runtime.model.attention.paged import Attention, PagedAttention
from phalanx_runtime.model.operators import launch_obstacle

log = logging.getLogger(__name__)


def _open_gpu(is_batch_invariant: bool) -> Attention:
    obstacle = launch_obstacle()
    if obstacle is not None:
        log.warning("attention gathers pages instead of reading them in a kernel", extra={"why": obstacle})
        return PagedAttention()
    from phalanx_runtime.model.attention.gpu import open_gpu_attention  # imports Triton

    return open_gpu_attention(is_batch_invariant)


def _open_reference(is_batch_invariant: bool) -> Attention:
    return PagedAttention()


BACKENDS: Mapping[str, Callable[[bool], Attention]] = {
    "cpu": open_cpu_attention,
    "cuda": _open_gpu,
}
"""By `torch.device.type`. Argument: `is_batch_invariant`."""


def choose_attention(device: torch.device, is_batch_invariant: bool = False) -> Attention:
    """Opens the backend; the torch reference for a device type without an entry."""
    backend = BACKENDS.get(device.type, _open_reference)
    return backend(is_batch_invariant)
