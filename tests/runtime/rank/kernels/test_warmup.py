"""Kernels are compiled before a rank serves, and later compilations are reported."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx_runtime.rank.kernels.account import NO_WARMUP, WarmupAccount
from phalanx_runtime.rank.kernels.loading import NoKernels, open_kernels
from phalanx_runtime.rank.kernels.warmup import CompileWatch


def compiled(watch: CompileWatch, name: str, cache_hit: bool) -> None:
    """Reports a compilation as Triton does."""
    watch(src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)


def test_compilations_while_serving_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch()
    compiled(watch, "gate", cache_hit=False)
    compiled(watch, "add_norm", cache_hit=True)
    assert (watch.num_compiled, watch.late, caplog.records) == (1, [], [])
    watch.start_serving()
    with caplog.at_level(logging.WARNING):
        compiled(watch, "merge_splits", cache_hit=True)
        compiled(watch, "paged_attention", cache_hit=False)
    assert (watch.num_compiled, watch.late) == (2, ["merge_splits", "paged_attention"])
    assert [record.how for record in caplog.records] == ["read from the cache", "compiled"]  # type: ignore[attr-defined]


def test_accounts_add_up() -> None:
    one = WarmupAccount(num_variants=3, num_compiled=2, seconds=1.5)
    assert NO_WARMUP + one + one == WarmupAccount(num_variants=6, num_compiled=4, seconds=3.0)


def test_a_cpu_loads_no_kernels() -> None:
    assert isinstance(open_kernels(torch.device("cpu"), torch.float32, 16), NoKernels)


def test_variants_compile_once_and_serve_launches(tmp_path: Path) -> None:
    """In real Triton without a device: warmed variants are those that tensors of a step specialise for."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.rank.kernels.warmed"]
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "nothing": 0,
        "first": [4, 4],
        "again": [4, 0],
        "on time": [],
        "late": ["gate"],
        "is the one of a launch": True,
    }
