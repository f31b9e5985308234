"""Certificates, authorities and API keys of programs are replaced while streams run."""

import os
import sys

import pytest

from bench.engine import rotations

pytestmark = pytest.mark.system


def test_rotations_break_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 of them: an authority comes and the former goes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    figures = rotations.measure(13, 3)
    assert figures.broken == [] and figures.whole > 3
