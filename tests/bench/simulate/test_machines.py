"""A measured machine keeps the proportions of its costs and gets as much work as the analytic one."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.simulate.__main__ import main
from bench.simulate.machines import ANALYTIC, STEP_TOKENS, TOKENS, Machine, read_machine, scale_load
from bench.simulate.traffic import reasoning
from phalanx_api.cost import StepModel, StepWork

FITTED = Path(__file__).parents[3] / "bench/simulate/costs/smollm2-135m-fp32.json"
SLOW = StepModel(fixed_s=0.03, token_s=0.002, knee_tokens=8, context_s=7e-6, attention_s=1e-6, error=0.03, row_s=0.0006)


def written(folder: Path, **fields: object) -> Path:
    fit = {"model": "m", "device": "cpu", "threads": 1, "page_bytes": 1600, "page_size": 16, "step_model": asdict(SLOW)}
    errors = {"held_out": {"num_points": 40, "median": 0.03, "p95": 0.14, "worst": 0.2}}
    path = folder / "fit.json"
    path.write_text(json.dumps(fit | {"errors": errors} | fields))
    return path


def test_full_step_keeps_its_time_other_steps_their_ratio(tmp_path: Path) -> None:
    machine, full = read_machine(written(tmp_path)), StepWork(STEP_TOKENS, 0, STEP_TOKENS, STEP_TOKENS**2 / 2)
    assert machine.model.predict(full) == pytest.approx(ANALYTIC.predict(full))
    one, many = StepWork(0, 1, 100), StepWork(64, 30, 9000, 500.0)
    assert machine.model.predict(many) / machine.model.predict(one) == pytest.approx(SLOW.predict(many) / SLOW.predict(one))
    assert machine.token_bytes == 100 and "3.0% (median), 14.0% (p95)" in machine.about


def test_as_much_work_comes_at_another_rate(tmp_path: Path) -> None:
    load, machine = reasoning(5.0, 200, random.Random(1)), read_machine(written(tmp_path))
    assert scale_load(load, Machine(), TOKENS) == load
    slower = scale_load(load, machine, TOKENS)
    ratio = slower[-1].at_s / load[-1].at_s
    assert ratio > 1 and [arrival.input_tokens for arrival in slower] == [arrival.input_tokens for arrival in load]
    assert scale_load(slower, machine, TOKENS)[-1].at_s == pytest.approx(ratio * slower[-1].at_s)


@pytest.mark.parametrize("fields", [{"errors": {}}, {"page_size": None}, {"step_model": [1.0, 2.0]}])
def test_another_file_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"lacks fields of the measurement|contains no step_model"):
        read_machine(written(tmp_path, **fields))


def test_command_reads_a_fit_and_names_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{i // 10:02d}.{i % 10}00000,{100 + i},{20 + i % 7}" for i in range(200)]
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join(lines) + "\n")
    assert main(["--traces", str(tmp_path), "--quick", "--workloads", "A", "--cost", str(FITTED), "--policies", "phalanx"]) == 0
    assert "the steps of SmolLM2-135M-Instruct on 1 thread(s) of cpu" in capsys.readouterr().out
