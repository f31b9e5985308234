"""The rotary embedding that a GGUF file describes, as `rope_parameters` of config.json.

Llama 3's scaling is in the file only as its result, a divisor for each frequency (tensor rope_freqs). All of its models have
the same bounds, so the factor, which is the largest divisor, says the rest; the divisors computed back must be the file's.
Source: Llama 3.1's reference code (apply_scaling) and llama.cpp's converter.
"""

import numpy as np
import numpy.typing as npt

from phalanx_runtime.checkpoint.gguf.file import GgufFile
from phalanx_runtime.errors import ModelError

ROPE_DIVISORS = "rope_freqs.weight"
_DEFAULT_THETA = 10000.0
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def rope_parameters(file: GgufFile, architecture: str) -> dict[str, object]:
    """The file's base and scaling. Raises ModelError for a scaling that config.json could not say."""
    theta = file.metadata.get(f"{architecture}.rope.freq_base", _DEFAULT_THETA)
    if not isinstance(theta, int | float):
        raise ModelError(f"{file.path}: {architecture}.rope.freq_base must be a number, it is {theta!r:.40}")
    divisors = next((tensor.float32() for tensor in file.tensors if tensor.name == ROPE_DIVISORS), None)
    kind = file.text(f"{architecture}.rope.scaling.type")
    if kind in (None, "none"):
        plain: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
        return plain if divisors is None else _llama3(file, float(theta), divisors)
    if kind == "linear" and divisors is None:
        factor = file.metadata.get(f"{architecture}.rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise ModelError(
        f"{file.path}: {architecture}.rope.scaling.type {kind!r} cannot be converted; use the safetensors checkpoint"
    )


def _llama3(file: GgufFile, theta: float, divisors: npt.NDArray[np.float32]) -> dict[str, object]:
    factor = float(divisors.max())
    if not np.allclose(divisors, llama3_divisors(theta, len(divisors), factor), rtol=1e-4):
        raise ModelError(f"{file.path}: {ROPE_DIVISORS} is not Llama 3's scaling; use the safetensors checkpoint")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }


def llama3_divisors(theta: float, num_frequencies: int, factor: float) -> npt.NDArray[np.float64]:
    """What each frequency is divided by: 1 for short waves, `factor` for long ones, between them a blend of the two."""
    wavelengths = 2 * np.pi * theta ** (np.arange(num_frequencies) / num_frequencies)
    share = (_ORIGINAL_POSITIONS / wavelengths - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    kept = np.clip(share, 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return divisors
