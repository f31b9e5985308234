"""Every kernel compiles for every architecture, with few spills, and two programs fit on a multiprocessor."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.runtime.model.gpu.ahead import EARLY_LOADS, EARLY_STORES, WIDE_LOADS

REGISTERS = 65536
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
TENSOR_CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
PIPELINED = ("decode", "prefill", "tree", "mixed", "experts", "linear tile")
"""Kernels that load into shared memory ahead of their use."""
EARLY = ("linear single", "decode", "mixed", "gate")
"""Kernels that start before the preceding ones end, from compute capability 9.0 on."""
LOOPS = ("linear single", "decode")
"""Kernels with one loop, which reads most of their memory."""
KNOWN_SPILLS = {
    "sm_80": {
        **{"linear tile q6_k 64x32": 2, "experts many gated table4": 2, "experts many down nvfp4": 38},
        **{"adapters expand_experts many down gpt-oss": 2, "experts many plain mxfp4": 30},
    },
    "sm_100": {
        "mixed tree split 64 window fp8": 2,
        "linear row q3_k 2": 2,
        **dict.fromkeys(("experts many gated q5_0", "experts many gated q5_1", "experts many gated q6_k"), 2),
        **{"experts many down iq4_nl": 4, "experts many down iq4_xs": 2},
    },
}
"""Accesses of spilled registers that remain, by target and kernel. Eight warps have none, and no 16-byte asynchronous loads."""
SLOW = pytest.mark.slow
RESERVED_BYTES = 1 << 10
"""Shared memory of each program that the driver reserves."""


def costs_of(*words: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.model.gpu.costs", *words]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check_loops(costs: dict[str, dict[str, Any]]) -> None:
    """Fails for a loop without 16-byte loads."""
    for name, cost in costs.items():
        if name.startswith(LOOPS):
            assert cost["instructions"][WIDE_LOADS], name


def test_decode_kernels_of_llama_fit_twice() -> None:
    """The subset that takes seconds; the tests below check all kernels."""
    costs = costs_of("sm_90", "few")
    check_loops(costs)
    assert len(costs) == 4
    for name, cost in costs.items():
        assert cost["spills"] == 0, name
        assert 2 * cost["registers"] * 32 * cost["warps"] <= REGISTERS, name
        assert 2 * (cost["shared_bytes"] + RESERVED_BYTES) <= SHARED_BYTES["sm_90"], name
        assert cost["instructions"]["PREEXIT"] and cost["instructions"]["ACQBULK"], name


@SLOW
@pytest.mark.parametrize("words", [("sm_90", "plain"), *((target,) for target in SHARED_BYTES)], ids=" ".join)
def test_kernels_for_nvidia_have_no_spills_and_wide_loads(words: tuple[str, ...]) -> None:
    """Those of compressed pages take most of the time."""
    target, costs = words[0], costs_of(*words)
    assert len(costs) > 40
    check_loops(costs)
    assert {name: cost["spills"] for name, cost in costs.items() if cost["spills"]} == KNOWN_SPILLS.get(target, {})
    for name, cost in costs.items():
        assert 2 * cost["registers"] * 32 * cost["warps"] <= REGISTERS, name
        programs = 1 if target == "sm_80" and name.startswith("experts many") and name.endswith("table4") else 2  # its look-ups
        assert programs * (cost["shared_bytes"] + RESERVED_BYTES) <= SHARED_BYTES[target], name
        found = cost["instructions"]
        has_small_tiles = name.endswith("int4") and name.startswith(("prefill", "mixed"))  # 8 bytes per thread
        has_small_tiles |= name.startswith("experts few gated") and name.endswith(("q2_k", "q3_k"))
        moves_words = name.startswith(("rows", "select", "route", "sort")) or name.startswith("inputs with")  # from any page on
        moves_words |= name.startswith(("round_in_turn", "linear read"))  # dimensions in any order; few rows
        if not has_small_tiles and not moves_words:
            assert found["LDGSTS.E.BYPASS.128" if name.startswith(PIPELINED) else "LDG.E.128"], name
    early = [name for name in costs if name.startswith(EARLY)]
    starts_early = target != "sm_80"
    assert len(early) > 12
    for name in early:
        found = costs[name]["instructions"]
        assert (found["PREEXIT"] > 0, found["ACQBULK"] > 0) == (starts_early, starts_early), name
        assert found[EARLY_STORES] == 0, name
        assert (found[EARLY_LOADS] > 0) == (starts_early and name.startswith("linear single")), name
    prefixes = ("prefill", "tree", "mixed", "experts many")
    large_tiles = [name for name in costs if name.startswith(prefixes) and "256" not in name]
    large_tiles += [name for name in costs if name.startswith("linear tile") and "32x16" not in name]
    assert [name for name in large_tiles if not costs[name]["instructions"][TENSOR_CORES[target]]] == []


@SLOW
def test_kernels_for_amd_have_no_spills() -> None:
    assert {name: cost["spills"] for name, cost in costs_of("gfx942").items() if cost["spills"]} == {}
