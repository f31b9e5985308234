"""Settings of all tests.

Property tests have no time limit per example, because a loaded machine is no failure. Without a GPU Triton's interpreter runs the
kernels; Triton reads the variable at its first import.
"""

import os
import shutil

from hypothesis import settings

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
