"""The benchmark's adapters load, and its steps have the requested slots."""

from pathlib import Path

from bench.engine.adapters import OUTPUT, PROMPT, STEP_TOKENS, plans_of, write_adapter
from phalanx_runtime.checkpoint.adapter import adapter_hash
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.config import parse_config, read_json
from tests.runtime.ranks import Build, make_model_runner
from tests.runtime.tiny import save_tiny


def test_random_adapters_fit_their_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", parse_config(read_json(base)), 3, seed=1)
    runner = make_model_runner(base, SoloCollective(), Build(max_loras=1))
    assert runner.adapters.load(1, str(adapter), adapter_hash(adapter)) == ""


def test_plans_compute_prompts_and_decodes_with_slots() -> None:
    slots = [1, 2, 0, 1, 2]
    prompts, decodes = plans_of(slots)
    assert [new.adapter for plan in prompts for new in plan.admitted] == slots
    assert all(len(plan.tokens) <= STEP_TOKENS for plan in prompts)
    assert sum(len(plan.tokens) for plan in prompts) == PROMPT * len(slots)
    assert len(decodes) == OUTPUT and all([new.adapter for new in plan.admitted] == slots for plan in decodes)
