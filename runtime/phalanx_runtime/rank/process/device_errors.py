"""Errors of the device that end a rank, with a reason of one line."""

import torch

from phalanx_runtime.errors import StepOutOfMemory
from phalanx_runtime.rank_spec import EXIT_DEVICE, EXIT_MEMORY

_OF_LIBRARIES = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""Starts of errors that are plain RuntimeErrors."""


def device_exit(error: BaseException) -> tuple[int, str] | None:
    """Returns exit code and reason for an error of the device or its memory; `None` for other errors.

    After a CUDA error each further call in this process fails, so the rank cannot go on.
    """
    if isinstance(error, StepOutOfMemory | torch.OutOfMemoryError):
        return EXIT_MEMORY, first_line(error)
    is_of_library = isinstance(error, RuntimeError) and first_line(error).startswith(_OF_LIBRARIES)
    return (EXIT_DEVICE, first_line(error)) if is_of_library or isinstance(error, torch.AcceleratorError) else None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text: torch adds advice on debugging below."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
