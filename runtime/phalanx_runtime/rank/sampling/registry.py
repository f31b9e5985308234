"""The sampler of each device type. A new backend is one module and one line in `BACKENDS`."""

from collections.abc import Callable, Mapping

import torch

from phalanx_runtime.rank.sampling.grammar import UNSUPPORTED_GRAMMARS, GrammarSource
from phalanx_runtime.rank.sampling.sampler import Sampler, TorchSampler

BACKENDS: Mapping[str, Callable[[int, GrammarSource], Sampler]] = {
    "cpu": TorchSampler,
    "cuda": TorchSampler,
}
"""By `torch.device.type`; called with `vocab_size` and `grammars`."""


def choose_sampler(device: torch.device, vocab_size: int, grammars: GrammarSource = UNSUPPORTED_GRAMMARS) -> Sampler:
    """Returns a sampler for `device`; the torch reference without an entry."""
    return BACKENDS.get(device.type, TorchSampler)(vocab_size, grammars)
