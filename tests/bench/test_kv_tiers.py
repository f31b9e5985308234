"""The benchmark of the host tier runs the engine's scheduler; its orderings hold, and no time is asserted."""

import json
from pathlib import Path

import pytest

from bench.kv_cache import fixed_pool
from bench.kv_cache.break_even import CHECKS, break_even, fit_loads, least_rate, measure_checks
from bench.kv_cache.conversations import generate, read
from bench.kv_cache.layered import LoadingSteps, gain_with_cores
from bench.kv_cache.tiers import THREE_TIERS, TWO_TIERS, main
from bench.kv_cache.virtual_run import CopyThread
from phalanx_api.cost import StepModel
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.copy_fit import CopyTimes
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.core.step_plan import PoolShape
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.tiers.host_pages import NO_HOST_PAGES, HostCopies
from tests.runtime.late_copies import LateCopies
from tests.runtime.ranks import Build, make_model_runner
from tests.runtime.tiny import save_tiny

MODEL = StepModel(fixed_s=0.01, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=1e-7)


def write_trace(path: Path) -> Path:
    """Writes nine conversations of six turns, each turn one block of 512 tokens longer; conversations take turns."""
    turns = [(turn, talk) for turn in range(6) for talk in range(9)]
    rows = [
        {"timestamp": 5000 * i, "input_length": 512 * (turn + 1) + 20, "output_length": 9, "hash_ids": ids(turn, talk)}
        for i, (turn, talk) in enumerate(turns)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(turn: int, talk: int) -> list[int]:
    return [*range(10 * talk, 10 * talk + turn + 1), 1000 + 10 * talk + turn]


def test_each_tier_finds_more_and_computes_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", str(write_trace(tmp_path / "trace.jsonl")), "--length-share", "0.125", "--copy-rate", "1e9"]
    flags += ["--disk-rate", "1e9", "--disk-share", "1.5"]
    flags += ["--load", "0.5", "--device-share", "0.2", "--host-share", "0.3", "--step-tokens", "256"]
    assert main([*flags, "--output", str(tmp_path / "out.json")]) == 0
    outcomes = json.loads((tmp_path / "out.json").read_text())
    device, both, disk, unlimited = (outcomes[name] for name in ("device", TWO_TIERS, THREE_TIERS, "no limit"))
    assert device["hit_tokens"] < both["hit_tokens"] < disk["hit_tokens"] <= unlimited["hit_tokens"]
    assert device["computed_tokens"] > both["computed_tokens"] > disk["computed_tokens"] >= unlimited["computed_tokens"]
    assert disk["fetched"] > 0 == both["fetched"]
    warm, cold = outcomes["warm restart"], outcomes["cold restart"]
    assert warm["computed_tokens"] < cold["computed_tokens"] and warm["fetched"] > 0
    assert both["stored"] > 0 and both["loaded"] > 0 == device["loaded"] == unlimited["loaded"]
    assert both["host_tokens"] == 16 * both["loaded"] and both["preemptions"] == 0
    assert both["declined"] == 0
    for outcome in (device, both, disk, unlimited):
        assert outcome["hit_tokens"] + outcome["computed_tokens"] == outcome["queried_tokens"]
        assert len(outcome["ttft_s"]) == 54
    assert "| device and host memory |" in capsys.readouterr().out


def test_trace_without_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    with pytest.raises(ValueError, match="no hash_ids"):
        read(path, None, 1.0)


def test_working_set_has_each_page_once(tmp_path: Path) -> None:
    for conversations in (generate(20), read(write_trace(tmp_path / "trace.jsonl"), 30, 0.125)):
        prompts = [conversations.prompt(i) for i in range(len(conversations.arrivals))]
        prefixes = {tuple(prompt[: end + 16]) for prompt in prompts for end in range(0, len(prompt) - 15, 16)}
        assert conversations.working_set(16) == len(prefixes)
        assert [len(prompt) for prompt in prompts] == [arrival.input_tokens for arrival in conversations.arrivals]


def test_copies_follow_each_other_and_steps_wait() -> None:
    copies = CopyThread(load_page_s=2.0, store_page_s=1.0)
    assert copies.start([(False, 0, 0)], must_wait=False, now=0.0) == 0.0
    assert copies.start([(True, 0, 0), (False, 1, 1)], must_wait=True, now=0.5) == 4.0
    assert copies.take_loads(3.9) == (0, 0.0)
    assert copies.take_loads(4.0) == (1, 2.0)
    assert copies.start([(True, 0, 0)], must_wait=False, now=5.0) == 5.0
    assert copies.start([], must_wait=False, now=5.5) == 7.0


@pytest.mark.parametrize("fixed_s", [0.0, 0.1])
@pytest.mark.parametrize("rate", [1e6, 1e7, 3e7, 1e9])
def test_loads_pay_from_the_break_even_on(rate: float, fixed_s: float) -> None:
    times = CopyTimes(fixed_s, 300_000 / rate)
    tokens = break_even(MODEL, times)
    pays = [pays_to_load(16 * n, 0, MODEL, times.predict(n)) for n in range(1, 8193)]
    assert tokens is None or (all(pays[tokens // 16 - 1 :]) and not any(pays[tokens // 16 - 2 : tokens // 16 - 1]))
    assert (tokens is None) == (not pays[-1])


def test_loads_have_fixed_and_page_times() -> None:
    times = fit_loads(num_pages=256, rounds=2)
    assert times.page_s > 0 and times.predict(256) > times.predict(1) > 0


def test_checks_of_loaded_pages_are_timed() -> None:
    checks = measure_checks(num_pages=8, pairs=2, batch=2)
    assert len(checks) == 1 + len(CHECKS) and all(page_us > 0 and share.middle > 0 for page_us, share in checks.values())


def test_least_rate_is_where_loads_begin_to_pay() -> None:
    rate = least_rate(MODEL, 300_000, 4)
    assert pays_to_load(64, 0, MODEL, 1_200_000 / (1.01 * rate)) and not pays_to_load(64, 0, MODEL, 1_200_000 / (0.99 * rate))


def served(capsys: pytest.CaptureFixture[str], conversations: int, *flags: str) -> dict[str, tuple[int, int]]:
    """Returns pages and preemptions by KV dtype."""
    assert fixed_pool.main(["--conversations", str(conversations), "--pool-tokens", "4096", "--load", "20", *flags]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    return {row[0]: (int(row[1].replace(",", "")), int(row[4].replace(",", ""))) for row in rows}


@pytest.mark.slow
def test_smaller_pages_serve_a_trace_with_fewer_preemptions(capsys: pytest.CaptureFixture[str]) -> None:
    found = served(capsys, 30)
    assert list(found) == ["auto", "fp8", "int8", "int4"]
    assert found["auto"][0] < found["fp8"][0] == found["int8"][0] < found["int4"][0]
    assert found["auto"][1] > found["int4"][1]


@pytest.mark.slow
def test_longer_outputs_preempt_more_requests(capsys: pytest.CaptureFixture[str]) -> None:
    former, longer = served(capsys, 12), served(capsys, 12, "--output-factor", "3")
    assert all(longer[name][1] > preemptions > 0 for name, (_, preemptions) in former.items())


def test_steps_load_by_layer_or_whole(tmp_path: Path) -> None:
    opened: list[LateCopies] = []

    def open_late(model: Model, caches: list[LayerCache], pool: PoolShape, rank: int) -> tuple[LateCopies, HostCopies]:
        opened.append(LateCopies(caches, pool))
        return opened[-1], NO_HOST_PAGES

    build = Build(num_pages=16, num_host_pages=16, open_host_pages=open_late)
    steps = LoadingSteps(make_model_runner(save_tiny(tmp_path / "model"), SoloCollective(), build))
    steps.store(8)
    steps.time(16, 8, by_layer=False)
    assert opened[0].num_late == 0
    steps.time(16, 8, by_layer=True)
    assert opened[0].num_late > 0


def test_a_core_each_hides_the_shorter_thread() -> None:
    assert gain_with_cores(3.0, 1.0, 100) == pytest.approx(4 / 3.01)
    assert gain_with_cores(1.0, 3.0, 1) == 1.0, "one layer waits for all its pages"
