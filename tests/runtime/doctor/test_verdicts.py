"""Verdicts of the doctor: a table of machines, and what each lacks."""

from typing import Any

import msgspec
import pytest

from phalanx_runtime.doctor.__main__ import as_table, rates_of
from phalanx_runtime.doctor.verdicts import MIN_SHM_BYTES, Device, Machine, judge

GPU = Device(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    memory_bytes=80 << 30,
    copy_bytes_per_s=2.9e12,
    matmul_flops_per_s=7.5e14,
    throttle=["sw_power_cap"],
)
SECOND = msgspec.structs.replace(GPU, index=1, copy_bytes_per_s=2.8e12)
CPU = Machine(
    processors=16,
    cpus=8,
    memory_bytes=64 << 30,
    shm_bytes=1 << 30,
    vectors=["avx2", "avx512", "bf16"],
    dtype="bfloat16",
    copy_bytes_per_s=2e10,
    matmul_flops_per_s=5e11,
    torch="2.11",
)
POD = msgspec.structs.replace(
    CPU, devices=[GPU, SECOND], cuda="13.0", driver="580.1", has_driver_files=True, nccl="2.27.5", vectors=["avx2"]
)


def device(**changes: Any) -> dict[str, Any]:
    return {"devices": [GPU, msgspec.structs.replace(SECOND, **changes)]}


@pytest.mark.parametrize("machine", [CPU, POD], ids=["processors", "devices"])
def test_good_machine_has_no_complaint(machine: Machine) -> None:
    assert [verdict for verdict in judge(machine) if verdict.status != "ok" or verdict.reason or verdict.change] == []


CASES: list[tuple[Machine, dict[str, Any], str, str]] = [
    (CPU, {"cpus": 0.5}, "slow processors", "the HTTP process and 1 rank processes share 0.5 CPUs"),
    (POD, {"cpus": 2}, "slow processors", "the HTTP process and 2 rank processes share 2 CPUs"),
    (CPU, {"shm_bytes": 64 << 20}, "broken shared memory", "ranks of a pod exchange data through /dev/shm"),
    (CPU, {"vectors": ["avx2", "avx512"], "dtype": "float32"}, "slow vectors", "without bf16 arithmetic weights take twice"),
    (CPU, {"vectors": []}, "slow vectors", "the kernels have no vectors of this processor"),
    (CPU, {"has_driver_files": True}, "broken driver", "the machine has a driver, but torch finds no device"),
    (POD, {"can_compile": False}, "slow kernels", "kernels that the image does not have compiled"),
    (POD, device(capability=(7, 5)), "slow device 1", "it has no bf16 arithmetic"),
    (POD, device(copy_bytes_per_s=1e12), "slow device 1 copy rate", "the device is slower than its product"),
    (POD, device(matmul_flops_per_s=3e14), "slow device 1 matmul rate", "the device is slower than its product"),
    (POD, device(ecc_uncorrected=2), "broken device 1 state", "2 uncorrected ECC errors"),
    (POD, device(throttle=["hw_thermal", "sw_power_cap"]), "slow device 1 state", "hw_thermal"),
    (POD, {"nccl": ""}, "broken NCCL", "ranks cannot communicate"),
    (POD, device(name="NVIDIA A100-SXM4-80GB"), "slow products", "ranks wait for the slowest device"),
    (POD, {"separated": [(0, 1)]}, "slow peer access", "these devices exchange data through host memory"),
]


@pytest.mark.parametrize(("machine", "changes", "expected", "reason"), CASES, ids=[case[2] for case in CASES])
def test_each_lack_is_named_with_a_change(machine: Machine, changes: dict[str, Any], expected: str, reason: str) -> None:
    (complaint,) = [one for one in judge(msgspec.structs.replace(machine, **changes)) if one.status != "ok"]
    assert f"{complaint.status} {complaint.check}" == expected
    assert complaint.reason.startswith(reason) and complaint.change


def test_unknown_product_is_measured_and_not_judged() -> None:
    machine = msgspec.structs.replace(POD, devices=[msgspec.structs.replace(GPU, name="NVIDIA L4", copy_bytes_per_s=1e11)])
    (copy,) = [verdict for verdict in judge(machine) if verdict.check == "device 0 copy rate"]
    assert (copy.status, copy.value) == ("ok", "0.10 TB/s; this product's is not known")


def test_table_shows_reason_and_change_below_a_complaint() -> None:
    machine = msgspec.structs.replace(CPU, shm_bytes=MIN_SHM_BYTES - 1)
    lines = as_table(judge(machine)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("broken   shared memory"))
    assert lines[at + 1].strip().startswith("why: ") and lines[at + 2].strip().startswith("change: ")
    assert lines[0].startswith("ok       processors        8 of 16 CPUs")


def test_saved_rates_are_those_of_the_slowest_device() -> None:
    rates = rates_of(POD)
    assert (rates.name, rates.copy_bytes_per_s, rates.matmul_flops_per_s) == (GPU.name, 2.8e12, 7.5e14)
    assert (rates_of(CPU).name, rates_of(CPU).copy_bytes_per_s) == ("cpu", 2e10)
