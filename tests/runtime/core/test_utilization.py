"""Use of the devices by steps, and the rates of products."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.roofline import DeviceRates, ModelShape, Roofline, product_rates, shape_of, step_demand
from phalanx_runtime.core.step_plan import DraftPath, StepPlan
from phalanx_runtime.core.utilization import WINDOW_S, Utilization, UtilizationMeter, plan_demand

SHAPE = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=32)
RATES = DeviceRates(name="test", copy_bytes_per_s=1e6, matmul_flops_per_s=1e8)
ROOF = Roofline(shape=SHAPE, rates=RATES, num_devices=2)
LAYERS, HEAD = 2 * (8 * (8 + 4) * 4 + 3 * 8 * 16), 32 * 8


def plan(*chunks: tuple[int, int], draws: int = 0, depth: int = 0) -> StepPlan:
    """Returns a plan with these (start, count) chunks."""
    return StepPlan(
        step=1,
        admitted=[],
        rows=list(range(len(chunks))),
        starts=[start for start, _ in chunks],
        counts=[count for _, count in chunks],
        pages=[[] for _ in chunks],
        tokens=[0] * sum(count for _, count in chunks),
        draws=[(i, 0) for i in range(draws)],
        copies=[],
        paths=[DraftPath(request=0, depth=depth, is_drafted=False)] if depth else [],
    )


@pytest.mark.parametrize(
    ("step", "num_bytes", "flops"),
    [
        (plan((9, 1), draws=1), 2 * (LAYERS + HEAD) + 10 * 64, 2 * (LAYERS + HEAD) + 4 * 2 * 16 * 10),
        (plan((0, 4)), 2 * LAYERS + 4 * 64, 2 * 4 * LAYERS + 4 * 2 * 16 * (1 + 2 + 3 + 4)),
        (plan((9, 3), draws=1, depth=2), 2 * (LAYERS + HEAD) + 12 * 64, 2 * 3 * (LAYERS + HEAD) + 4 * 2 * 16 * (10 + 11 + 12)),
    ],
    ids=["decode", "chunk without logits", "draft tokens"],
)
def test_demand_counts_weights_contexts_and_logits(step: StepPlan, num_bytes: float, flops: float) -> None:
    demand = plan_demand(SHAPE, step)
    assert (demand.bytes, demand.flops) == (num_bytes, flops)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_int8_weights_halve_the_bytes_of_weights_only(chunks: list[tuple[int, int]], draws: int) -> None:
    step = plan(*chunks, draws=min(draws, len(chunks)))
    whole, half = plan_demand(SHAPE, step), plan_demand(replace(SHAPE, bytes_per_weight=1, bytes_per_head_weight=1), step)
    assert whole.flops == half.flops and whole.bytes - half.bytes == LAYERS + HEAD


def test_busy_ratio_is_the_devices_share_of_the_time() -> None:
    meter, now = UtilizationMeter(), 0.0
    for _ in range(1000):
        now += 0.1
        meter.add(plan((9, 1)), 0.08, 0.06, now)
    assert meter.utilization(now).busy == pytest.approx(0.6, rel=0.05)
    assert meter.utilization(now + WINDOW_S).busy == pytest.approx(0.6 * math.exp(-1), rel=0.05)
    assert meter.utilization(now, is_idle=True) == Utilization()


def test_single_step_has_its_own_utilization() -> None:
    meter, step = UtilizationMeter(ROOF), plan((9, 1), draws=1)
    meter.add(step, 0.02, 0.5, 7.0)
    used, demand = meter.utilization(7.0), plan_demand(SHAPE, step)
    assert used.busy == 1.0, "a device computes at most as long as the step takes"
    assert used.bandwidth == pytest.approx(demand.bytes / (0.02 * 2 * 1e6))
    assert used.flops == pytest.approx(demand.flops / (0.02 * 2 * 1e8))


def test_pauses_lower_the_busy_ratio_only() -> None:
    meter, step = UtilizationMeter(ROOF), plan((9, 1), draws=1)
    meter.add(step, 0.1, 0.1, 1.0)
    before, after = meter.utilization(1.0), meter.utilization(4.0)
    assert after.busy < before.busy / 2 and after.bandwidth == pytest.approx(before.bandwidth)


def test_engine_without_steps_or_rates_reports_zeros() -> None:
    assert UtilizationMeter(ROOF).utilization(3.0) == Utilization()
    meter = UtilizationMeter()
    meter.add(plan((0, 4)), 0.1, 0.1, 1.0)
    assert (meter.utilization(1.0).bandwidth, meter.utilization(1.0).flops) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_rates_are_those_of_the_exact_product(name: str, found: str | None) -> None:
    rates = product_rates(name)
    assert (rates.name if rates else None) == found


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"])
def test_other_kinds_of_models_have_no_shape(key: str) -> None:
    config = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
    assert shape_of(config).head_dim == 2
    with pytest.raises(KeyError):
        shape_of({**config, key: 8})


def test_step_without_tokens_demands_nothing() -> None:
    demand = step_demand(SHAPE, tokens=0, num_logits=0, keys_read=0, token_keys=0)
    assert (demand.bytes, demand.flops) == (0, 0)
