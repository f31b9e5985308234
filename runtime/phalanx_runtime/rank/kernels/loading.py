"""Loads the kernels of a rank before its first step. Imports no Triton, which CPU ranks do without."""

from typing import Protocol

import torch

from phalanx_runtime.model.kernels.folder import usable_folder
from phalanx_runtime.model.operators import launch_obstacle
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.kernels.account import NO_WARMUP, WarmupAccount


class KernelLoader(Protocol):
    """Compiles or loads kernels. Implemented in `warmup`."""

    @property
    def account(self) -> WarmupAccount:
        """Of all calls."""
        ...

    def load_models(self, target: Model, world_size: int, draft: Model | None) -> None:
        """Loads what layers launch. `world_size`: ranks that share a layer of the target; one computes the draft model."""
        ...

    def load_steps(self, model: Model, max_pages: int, has_window: bool = False, has_parts: bool = False) -> None:
        """Loads what steps launch beside the model. `max_pages`: of a request; 0 if the host samples all steps.

        `has_window`, `has_parts`: see `step_variants`.
        """
        ...

    def start_serving(self) -> None:
        """Logs the account; compilations from now on are warnings."""
        ...


class NoKernels:
    """`KernelLoader` of a rank that launches no kernel."""

    account = NO_WARMUP

    def load_models(self, target: Model, world_size: int, draft: Model | None) -> None:
        """Loads nothing."""

    def load_steps(self, model: Model, max_pages: int, has_window: bool = False, has_parts: bool = False) -> None:
        """Loads nothing."""

    def start_serving(self) -> None:
        """Logs nothing."""


def open_kernels(device: torch.device, dtype: torch.dtype, page_size: int, kv_cache_dtype: str = "auto") -> KernelLoader:
    """Opens the kernels of a device, before the first launch."""
    if device.type == "cpu" or launch_obstacle() is not None:
        return NoKernels()
    from phalanx_runtime.model.kernels.cache import open_folder  # imports Triton
    from phalanx_runtime.rank.kernels.warmup import RankKernels

    folder = usable_folder()
    if folder is not None:
        open_folder(folder)
    capability = torch.cuda.get_device_properties(device).major
    return RankKernels(dtype, page_size, capability, kv_cache_dtype=kv_cache_dtype)
