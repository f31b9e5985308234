"""Settings of all tests.

Property tests have no time limit per example, because a loaded machine is no failure. Without a GPU Triton's interpreter runs the
kernels; Triton reads the variable at its first import, which torch would cause.
"""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):  # of NVIDIA, of AMD
    os.environ["TRITON_INTERPRET"] = "1"
