"""The attention backend of each device type. A new backend is one module and one line in `BACKENDS`."""

from collections.abc import Callable, Mapping

import torch

from phalanx_runtime.model.attention.cpu import open_cpu_attention
from phalanx_runtime.model.attention.paged import Attention, PagedAttention


def _open_reference(is_fixed: bool) -> Attention:
    return PagedAttention()


BACKENDS: Mapping[str, Callable[[bool], Attention]] = {
    "cpu": open_cpu_attention,
    "cuda": _open_reference,
}
"""By `torch.device.type`. The argument of a backend is `is_fixed`: a token's bits do not depend on the rest of its step."""


def choose_attention(device: torch.device, is_fixed: bool = False) -> Attention:
    """Returns the attention backend for `device`; the torch reference for a device type without an entry."""
    backend = BACKENDS.get(device.type, _open_reference)
    return backend(is_fixed)
