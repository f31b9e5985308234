"""nvidia-ml-py over a fake driver library, and without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx_runtime.server.devices.nvml import open_devices, visible_devices

SOURCE = Path(__file__).with_name("fake_nvml.c")
PROGRAM = """
import dataclasses, json, os, sys
from phalanx_runtime.server.devices.nvml import open_devices
source = open_devices(2, os.environ.get("CUDA_VISIBLE_DEVICES"))
if source is None:
    sys.exit("no source")
events = [source.wait(0.0), source.wait(0.0)]
readings = [dataclasses.asdict(reading) | {"throttle": sorted(reading.throttle)} for reading in source.read()]
source.close()
print(json.dumps({"readings": readings, "events": [event and dataclasses.astuple(event) for event in events]}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver library."""
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    return folder


def run(library: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment | variables, text=True, capture_output=True)


def test_library_values_become_readings_and_events(library: Path) -> None:
    found: dict[str, Any] = json.loads(run(library).stdout)
    first, second = found["readings"]
    assert first == {
        "index": 0,
        "uuid": "GPU-a",
        "name": "Fake",
        "memory_used_bytes": 600,
        "memory_total_bytes": 1000,
        "power_w": 250.5,
        "power_limit_w": None,
        "energy_j": 1234.5,
        "sm_clock_hz": 1.41e9,
        "max_sm_clock_hz": 1.98e9,
        "memory_clock_hz": 2.619e9,
        "temperature_c": 71,
        "throttle": ["hw_thermal", "sw_power_cap"],
        "ecc_corrected": 12,
        "ecc_uncorrected": 1,
        "busy": 0.87,
        "lost": "",
    }
    assert (second["uuid"], second["memory_used_bytes"]) == ("GPU-b", None) and second["lost"]
    assert found["events"] == [[0, 79], None]


def test_visible_devices_are_numbered_as_by_ranks(library: Path) -> None:
    found = json.loads(run(library, CUDA_VISIBLE_DEVICES="GPU-b,0").stdout)
    assert [(reading["index"], reading["uuid"]) for reading in found["readings"]] == [(0, "GPU-b"), (1, "GPU-a")]
    assert found["events"] == [[1, 79], None]


@pytest.mark.parametrize("events", ["lost", "unnamed"])
def test_driver_of_a_lost_device_is_still_read(library: Path, events: str) -> None:
    """NVML then fails to wait for events, and to name the device of one."""
    done = run(library, FAKE_NVML_EVENTS=events)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [bool(reading["lost"]) for reading in found["readings"]] == [False, True]
    assert found["events"] == [None, None]


def test_no_visible_device_makes_no_source(library: Path) -> None:
    assert run(library, CUDA_VISIBLE_DEVICES="").stderr.endswith("no source\n")


def test_machine_without_a_driver_has_no_source(caplog: pytest.LogCaptureFixture) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    caplog.set_level("INFO")
    assert open_devices(1, None) is None
    assert [record.getMessage() for record in caplog.records] == ["devices are not monitored"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-a", [0]),
        ("GPU-b,GPU-c", [1, 2]),
        ("0,7,1", [0]),
        ("GPU-", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_follow_the_rules_of_cuda(visible: str | None, indices: list[int]) -> None:
    assert visible_devices(["GPU-aa", "GPU-bb", "GPU-cc"], visible) == indices
