"""What one can do to vectors before they are compared: each learned on the tuning part, as online on stored vectors."""

from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from bench.router.answers.vectors import Vectors

Remedy = Callable[[Vectors, Vectors], Vectors]
"""Vectors to learn from and vectors to change; returns the changed ones, of length 1."""


def raw(learned: Vectors, vectors: Vectors) -> Vectors:
    return _scaled(vectors)


def centred(learned: Vectors, vectors: Vectors) -> Vectors:
    return _scaled(_scaled(vectors) - _scaled(learned).mean(0))


def without_component(learned: Vectors, vectors: Vectors) -> Vectors:
    """Subtracts the mean, and the first principal component too. Source: Mu and Viswanath 2018."""
    mean = _scaled(learned).mean(0)
    component = np.linalg.svd(_scaled(learned) - mean, full_matrices=False)[2][:1]
    changed = _scaled(vectors) - mean
    return _scaled(cast(Vectors, changed - (changed @ component.T) @ component))


REMEDIES: dict[str, Remedy] = {"raw": raw, "centred": centred, "without the first component": without_component}


def _scaled(vectors: Vectors) -> Vectors:
    lengths: npt.NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return cast(Vectors, vectors / lengths)
