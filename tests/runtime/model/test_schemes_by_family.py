"""Each scheme gives the tokens of its dequantised weights in each family: four schemes always, all in `make test-all`."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from phalanx_runtime.model.linear.registry import Kernels
from tests.runtime.model import fp8_checkpoints, integer_checkpoints, table_checkpoints
from tests.runtime.model.equal import compare
from tests.runtime.model.fp8_checkpoints import save_fp8
from tests.runtime.model.integer_checkpoints import save_integers
from tests.runtime.model.reference import generate, reference
from tests.runtime.model.table_checkpoints import save_tables
from tests.runtime.model.targets import compiled
from tests.runtime.ranks import Build
from tests.runtime.tiny import FAMILIES, save_tiny

Save = Callable[[Path, Path, Path], None]
"""Writes a checkpoint quantised, and dequantised in fp32."""
FUSED = tuple(family for family in FAMILIES if family != "gpt_oss")
"""Experts of gpt-oss are no linears of their own, so that it has a scheme of its own, MXFP4."""
GENERIC = "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3"
SCHEMES: Mapping[str, tuple[Save, str]] = {
    **{f"fp8 {kind}": (partial(save_fp8, kind=kind), "fp8") for kind in fp8_checkpoints.KINDS},
    **{name: (partial(save_integers, kind=kind), f"{kind.bits} bits") for name, kind in integer_checkpoints.KINDS.items()},
    **{
        f"table {name}": (partial(save_tables, config=config, pack=pack), "8 bits" if name == "int8" else "4 bits")
        for name, (config, pack) in table_checkpoints.KINDS.items()
    },
}
"""How a checkpoint is written, and what its weights are in memory."""
ALWAYS = "fp8 block", "gptq order", "table nvfp4"
CASES = [
    pytest.param(family, name, id=f"{family}, {name}", marks=() if name in ALWAYS and family in FUSED else pytest.mark.slow)
    for family in (*FUSED, *GENERIC)
    for name in SCHEMES
    if not (family.startswith("deepseek") and name == "table nvfp4")  # the tiny latents have 24 inputs, no multiple of 16
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By C++ kernels on packed codes, also on two ranks, and by torch."""
    compiled("native")
    (save, loaded_as), folder, exact = SCHEMES[name], tmp_path / "packed", tmp_path / "exact"
    save(save_tiny(tmp_path / "model", family), folder, exact)
    for ranks, kernels in ((1, Kernels(compiled=True)), (2, Kernels(compiled=True)), (1, Kernels())):
        caplog.clear()
        with caplog.at_level(logging.INFO, "phalanx_runtime.model.stored.matrices"):
            outputs = generate(folder, [ranks], Build(kernels=kernels))
        assert compare(reference(exact, outputs), outputs).holds, (ranks, kernels)
        found = {vars(record)["loaded_as"] for record in caplog.records if record.message == "quantised checkpoint"}
        assert found == {loaded_as} or (not kernels.compiled and found == {"torch.float32"})
