"""Errors of the device that end a rank, with a reason of one line."""

import torch

from phalanx_runtime.collective.library import OWN_FAILURE
from phalanx_runtime.errors import StepOutOfMemory
from phalanx_runtime.rank_spec import EXIT_DEVICE, EXIT_MEMORY

_OF_LIBRARIES = ("CUDA error", "CUDA driver error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")
"""Starts of errors that are plain RuntimeErrors."""
_NO_MEMORY = "out of memory"
"""In errors of torch, Triton and NCCL."""


def device_exit(error: BaseException) -> tuple[int, str] | None:
    """Returns exit code and reason for an error of the device or its memory; `None` for other errors.

    After an error of CUDA or HIP each further call in this process fails, so the rank cannot go on.
    """
    if isinstance(error, StepOutOfMemory | torch.OutOfMemoryError):
        return EXIT_MEMORY, first_line(error)
    is_of_nccl = isinstance(error, RuntimeError) and OWN_FAILURE in str(error)
    why = " ".join(str(error).split()) if is_of_nccl else first_line(error)  # NCCL names the call below
    is_of_library = isinstance(error, RuntimeError) and why.startswith(_OF_LIBRARIES)
    if not (is_of_nccl or is_of_library or isinstance(error, torch.AcceleratorError)):
        return None
    return EXIT_MEMORY if _NO_MEMORY in why else EXIT_DEVICE, why


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text: torch adds advice on debugging below."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
