"""Each program installs what it needs, and no more, with hashes."""

import pathlib
import re

import pytest

PINS = pathlib.Path(__file__).parents[2] / "requirements"


def names(program: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)(?:\[.*\])?==", (PINS / f"{program}.txt").read_text(), re.M))


@pytest.mark.parametrize("program", ["operator", "router"])
def test_control_programs_carry_no_torch(program: str) -> None:
    assert names(program) & {"torch", "transformers", "triton"} == set()


def test_only_routers_carry_the_index_of_vectors() -> None:
    assert [program for program in ("operator", "router", "runtime") if "usearch" in names(program)] == ["router"]
    assert "numpy" not in names("operator")


def test_runtime_installs_torch_and_the_api_server() -> None:
    assert names("runtime") >= {"torch", "transformers", "safetensors", "fastapi", "uvicorn", "pyzmq"}


def test_the_operator_carries_time_zones_for_schedules() -> None:
    """Its image has no system zones; these come with the Kubernetes client."""
    assert "tzdata" in names("operator")


@pytest.mark.parametrize("program", ["operator", "router", "runtime", "dev", "api", "clients"])
def test_every_pin_has_a_hash(program: str) -> None:
    text = (PINS / f"{program}.txt").read_text()
    pins = re.findall(r"^\S.*==.*$", text, re.M)
    assert [pin for pin in pins if not pin.endswith("\\") or f"{pin}\n    --hash=sha256:" not in text] == []
