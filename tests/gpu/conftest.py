"""`place`: a GPU, selected by `-m gpu`, or tiny sizes on a CPU where no GPU is."""

import gc

import pytest
import torch

from tests.gpu.places import CPU, GPU, Place

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(CPU, id="cpu", marks=pytest.mark.skipif(HAS_GPU, reason="Triton compiles for the GPU")),
        pytest.param(GPU, id="gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    """Device and sizes."""
    if HAS_GPU:
        gc.collect()  # graphs of earlier tests are in cycles: one that is collected during a capture ends it
    found: Place = request.param
    return found
